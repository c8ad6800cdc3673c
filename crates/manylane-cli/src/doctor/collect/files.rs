//! Reads files below a root. In tests the root is a folder with the `/proc` and `/sys` of some
//! machine.

use std::fs;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;

/// The files below a root.
#[derive(Clone, Debug)]
pub(crate) struct FileTree {
    root: PathBuf,
}

impl FileTree {
    /// The root of this machine.
    pub(crate) fn live() -> Self {
        Self { root: "/".into() }
    }

    #[cfg(test)]
    pub(crate) fn under(root: &Path) -> Self {
        Self { root: root.into() }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Content of a file, trimmed; `None` if it cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        // Some files have bytes that are not valid text, such as names of processes.
        let bytes = fs::read(self.path(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// A list such as `0-3,6`.
    pub(crate) fn cpu_list(&self, path: &str) -> Option<Vec<usize>> {
        manylane_sys::cpu::parse_list(&self.text(path)?)
    }

    /// The CPUs that a thread may run on, by its `status`.
    pub(crate) fn allowed_cpus(&self, status: &str) -> Option<Vec<usize>> {
        let text = self.text(status)?;
        let list = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        manylane_sys::cpu::parse_list(list)
    }

    /// A mask such as `3` or `ff,00000001`.
    pub(crate) fn cpu_mask(&self, path: &str) -> Option<Vec<usize>> {
        Some(parse_cpu_mask(&self.text(path)?))
    }

    /// Names in a folder, sorted; those that end with numbers by these.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().to_str().map(Into::into)).collect();
        names.sort_by_key(|name| {
            let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
            let (word, number) = name.split_at(name.len() - digits);
            (word.to_owned(), number.parse::<u64>().unwrap_or(0))
        });
        names
    }

    /// The last part of a link's target.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}

/// The CPUs of a mask.
pub(crate) fn parse_cpu_mask(mask: &str) -> Vec<usize> {
    let digits = mask.chars().rev().filter(|&c| c != ',').enumerate();
    let mut cpus: Vec<usize> = digits
        .flat_map(|(at, digit)| {
            let bits = digit.to_digit(16).unwrap_or(0);
            (0..4).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| at * 4 + bit)
        })
        .collect();
    cpus.sort_unstable();
    cpus
}

/// The mask of CPUs, as the kernel takes it: words of 32 bits, the highest first.
pub(crate) fn format_cpu_mask(cpus: &[usize]) -> String {
    let words = cpus.iter().max().map_or(1, |cpu_max| cpu_max / 32 + 1);
    let word = |at: usize| {
        cpus.iter().filter(|&&cpu| cpu / 32 == at).fold(0_u32, |word, cpu| word | 1 << (cpu % 32))
    };
    let mut text = format!("{:x}", word(words - 1));
    for at in (0..words - 1).rev() {
        text += &format!(",{:08x}", word(at));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_masks_round_trip() {
        for (mask, cpus) in [
            ("0", vec![]),
            ("3", vec![0, 1]),
            ("f0", vec![4, 5, 6, 7]),
            ("1,00000002", vec![1, 32]),
            ("80000000,00000000,00000001", vec![0, 95]),
        ] {
            assert_eq!(parse_cpu_mask(mask), cpus);
            assert_eq!(format_cpu_mask(&cpus), mask);
        }
        assert_eq!(parse_cpu_mask("00000000,00000003"), [0, 1]);
    }

    #[test]
    fn missing_files_read_as_none() {
        let files = FileTree::under(Path::new("/no/such/folder"));
        assert_eq!((files.text("a"), files.number("b"), files.cpu_mask("c")), (None, None, None));
        assert!(files.names("").is_empty() && files.link_name("d").is_none());
    }
}
