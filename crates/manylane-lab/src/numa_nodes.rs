//! The NUMA nodes of a machine, and their distance to a device.

use std::fs;
use std::path::Path;

use manylane_sys::cpu;

/// Folder of the nodes.
pub(super) const SYSFS_DIR: &str = "/sys/devices/system/node";

/// A node and its CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NumaNode {
    pub(super) id: usize,
    pub(super) cpus: Vec<usize>,
}

/// The online nodes, from a folder in the form of [`SYSFS_DIR`]; empty if unknown.
pub(super) fn read_nodes(folder: &Path) -> Vec<NumaNode> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let numbers = cpu::parse_list(&text("online")).unwrap_or_default();
    let cpus = |node| cpu::parse_list(&text(&format!("node{node}/cpulist"))).unwrap_or_default();
    let node = |id| NumaNode { id, cpus: cpus(id) };
    numbers.into_iter().map(node).collect()
}

/// The nodes that receivers are bound to.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NodeChoice {
    /// The node of the device, with those of its CPUs that receivers may use.
    pub(super) local: Result<NumaNode, String>,
    /// Another one.
    pub(super) remote: Result<NumaNode, String>,
}

/// Selects the node of the device and another one. A device between two hosts of a testbed has no
/// node of its own. Its work is done where the frames are generated, so that its node is that of
/// `device_cpu`.
pub(super) fn choose_nodes(nodes: &[NumaNode], device_cpu: usize, receiver_cpus: &[usize]) -> NodeChoice {
    if nodes.is_empty() {
        let why = || Err(format!("the kernel reports no NUMA nodes ({SYSFS_DIR}; needs CONFIG_NUMA)"));
        return NodeChoice { local: why(), remote: why() };
    }
    let usable = |node: &NumaNode| -> Option<NumaNode> {
        let cpus: Vec<usize> = node.cpus.iter().copied().filter(|cpu| receiver_cpus.contains(cpu)).collect();
        (!cpus.is_empty()).then_some(NumaNode { id: node.id, cpus })
    };
    let is_near = |node: &&NumaNode| node.cpus.contains(&device_cpu);
    let near = match nodes.iter().find(is_near) {
        Some(node) => usable(node).ok_or_else(|| {
            format!("node {}, which does the device's work, has no CPU left for receivers", node.id)
        }),
        None => Err(format!("CPU {device_cpu}, which does the device's work, belongs to no node")),
    };
    let far = nodes.iter().filter(|node| !is_near(node)).find_map(usable).ok_or_else(|| match nodes.len() {
        1 => "this machine has one NUMA node: the column NUMA only shows the cost of binding memory and threads to it"
            .into(),
        _ => "no other node has CPUs for receivers".into(),
    });
    NodeChoice { local: near, remote: far }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A folder in the kernel's form.
    fn folder(files: &[(&str, &str)]) -> TempDir {
        let folder = TempDir::new().unwrap();
        for (file, text) in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    fn node(number: usize, cpus: &[usize]) -> NumaNode {
        NumaNode { id: number, cpus: cpus.to_vec() }
    }

    #[test]
    fn two_numa_nodes_are_distinguished() {
        let two =
            folder(&[("online", "0-1\n"), ("node0/cpulist", "0-3,8-11\n"), ("node1/cpulist", "4-7,12-15\n")]);
        let nodes = read_nodes(two.path());
        assert_eq!(nodes, [node(0, &[0, 1, 2, 3, 8, 9, 10, 11]), node(1, &[4, 5, 6, 7, 12, 13, 14, 15])]);
        // The generator has the last CPU, of node 1. Receivers have some of each node.
        let choice = choose_nodes(&nodes, 15, &[0, 1, 4, 5, 14]);
        assert_eq!(choice, NodeChoice { local: Ok(node(1, &[4, 5, 14])), remote: Ok(node(0, &[0, 1])) });
        let choice = choose_nodes(&nodes, 0, &[4, 5]);
        assert!(choice.local.unwrap_err().contains("node 0, which does the device's work, has no CPU left"));
        assert_eq!(choice.remote, Ok(node(1, &[4, 5])));
        let choice = choose_nodes(&nodes, 15, &[4]);
        assert_eq!(choice.local, Ok(node(1, &[4])));
        assert!(choice.remote.unwrap_err().contains("no other node has CPUs"));
    }

    #[test]
    fn a_node_of_memory_alone_is_not_picked() {
        let cxl = folder(&[("online", "0,2\n"), ("node0/cpulist", "0-1\n"), ("node2/cpulist", "\n")]);
        let nodes = read_nodes(cxl.path());
        assert_eq!(nodes, [node(0, &[0, 1]), node(2, &[])]);
        let choice = choose_nodes(&nodes, 1, &[0]);
        assert_eq!(choice.local, Ok(node(0, &[0])));
        assert!(choice.remote.is_err());
    }

    #[test]
    fn missing_and_single_numa_nodes_are_reported() {
        let choice = choose_nodes(&[node(0, &[0, 1])], 1, &[0]);
        assert_eq!(choice.local, Ok(node(0, &[0])));
        assert!(choice.remote.unwrap_err().contains("has one NUMA node"));
        let none = choose_nodes(&read_nodes(Path::new("/nonexistent")), 1, &[0]);
        assert!(none.local.unwrap_err().contains("CONFIG_NUMA") && none.remote.is_err());
    }
}
