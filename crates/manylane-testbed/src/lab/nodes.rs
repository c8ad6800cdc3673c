//! The NUMA nodes of a machine, and which of them are near to a device.

use std::fs;
use std::path::Path;

use crate::machine::parse_cpu_list;

/// Where the kernel tells of them.
pub(super) const FOLDER: &str = "/sys/devices/system/node";

/// A node and its processors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) number: usize,
    pub(super) cpus: Vec<usize>,
}

/// Those that are on line, from a folder in the form of [`FOLDER`]; empty where the kernel does not tell.
pub(super) fn read(folder: &Path) -> Vec<Node> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let numbers = parse_cpu_list(text("online").trim());
    let node = |number| Node { number, cpus: parse_cpu_list(text(&format!("node{number}/cpulist")).trim()) };
    numbers.into_iter().map(node).collect()
}

/// Where receivers are bound to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// The node that has the device, with those processors of it that receivers may have.
    pub(super) near: Result<Node, String>,
    /// Another one.
    pub(super) far: Result<Node, String>,
}

/// Picks a node at the device and one that is not. A device between two hosts of a testbed has no node of its own: its work is done where
/// the frames are made, so that its node is the one of `device_cpu`.
pub(super) fn choose(nodes: &[Node], device_cpu: usize, receiver_cpus: &[usize]) -> Choice {
    if nodes.is_empty() {
        let why = || Err(format!("the kernel tells of no NUMA nodes ({FOLDER}, CONFIG_NUMA)"));
        return Choice { near: why(), far: why() };
    }
    let usable = |node: &Node| -> Option<Node> {
        let cpus: Vec<usize> = node.cpus.iter().copied().filter(|cpu| receiver_cpus.contains(cpu)).collect();
        (!cpus.is_empty()).then_some(Node { number: node.number, cpus })
    };
    let is_near = |node: &&Node| node.cpus.contains(&device_cpu);
    let near = match nodes.iter().find(is_near) {
        Some(node) => usable(node).ok_or_else(|| {
            format!(
                "node {}, where the device's work is done, has no processor left for receivers",
                node.number
            )
        }),
        None => Err(format!("CPU {device_cpu}, which does the device's work, is of no node")),
    };
    let far = nodes.iter().filter(|node| !is_near(node)).find_map(usable).ok_or_else(|| match nodes.len() {
        1 => "this machine has one NUMA node: the column NUMA shows only what binding memory and threads to it costs"
            .into(),
        _ => "no other node has processors that receivers may have".into(),
    });
    Choice { near, far }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A folder as the kernel has it.
    fn folder(files: &[(&str, &str)]) -> TempDir {
        let folder = TempDir::new().unwrap();
        for (file, text) in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    fn node(number: usize, cpus: &[usize]) -> Node {
        Node { number, cpus: cpus.to_vec() }
    }

    #[test]
    fn two_nodes_are_read_and_told_apart() {
        let two =
            folder(&[("online", "0-1\n"), ("node0/cpulist", "0-3,8-11\n"), ("node1/cpulist", "4-7,12-15\n")]);
        let nodes = read(two.path());
        assert_eq!(nodes, [node(0, &[0, 1, 2, 3, 8, 9, 10, 11]), node(1, &[4, 5, 6, 7, 12, 13, 14, 15])]);
        // The generator has the last processor, which is of node 1; receivers have some of each.
        let choice = choose(&nodes, 15, &[0, 1, 4, 5, 14]);
        assert_eq!(choice, Choice { near: Ok(node(1, &[4, 5, 14])), far: Ok(node(0, &[0, 1])) });
        let choice = choose(&nodes, 0, &[4, 5]);
        assert!(
            choice
                .near
                .unwrap_err()
                .contains("node 0, where the device's work is done, has no processor left")
        );
        assert_eq!(choice.far, Ok(node(1, &[4, 5])));
        let choice = choose(&nodes, 15, &[4]);
        assert_eq!(choice.near, Ok(node(1, &[4])));
        assert!(choice.far.unwrap_err().contains("no other node has processors"));
    }

    #[test]
    fn a_node_of_memory_alone_is_not_picked() {
        let cxl = folder(&[("online", "0,2\n"), ("node0/cpulist", "0-1\n"), ("node2/cpulist", "\n")]);
        let nodes = read(cxl.path());
        assert_eq!(nodes, [node(0, &[0, 1]), node(2, &[])]);
        let choice = choose(&nodes, 1, &[0]);
        assert_eq!(choice.near, Ok(node(0, &[0])));
        assert!(choice.far.is_err());
    }

    #[test]
    fn one_node_says_that_it_is_one_and_none_that_there_is_none() {
        let choice = choose(&[node(0, &[0, 1])], 1, &[0]);
        assert_eq!(choice.near, Ok(node(0, &[0])));
        assert!(choice.far.unwrap_err().contains("has one NUMA node"));
        let none = choose(&read(Path::new("/nonexistent")), 1, &[0]);
        assert!(none.near.unwrap_err().contains("CONFIG_NUMA") && none.far.is_err());
    }
}
