//! Placement: which CPU a lane's thread runs on.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use manylane_sys::cpu;

use crate::error::{Error, ErrorKind, Result};

/// Selects the CPU of each lane's thread. With more lanes than CPUs it starts over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placement {
    /// Physical cores first, and hardware threads that share a core last. Packages (CPU sockets)
    /// alternate.
    #[default]
    Spread,
    /// As close together as possible: all hardware threads of a core, all cores of a package, then
    /// the next.
    Pack,
    /// These CPUs, in this order.
    List(Vec<usize>),
    /// No pinning: the scheduler decides.
    None,
}

impl Placement {
    /// The CPUs for lanes, in order; empty without pinning.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if a listed CPU is not among the `allowed` ones.
    pub(crate) fn order(&self, allowed: &[Cpu]) -> Result<Vec<usize>> {
        match self {
            Self::None => Ok(Vec::new()),
            Self::List(list) => {
                if list.is_empty() {
                    return Err(Error::new(ErrorKind::Config, "placement: the list of CPUs is empty"));
                }
                match list.iter().find(|cpu| allowed.iter().all(|allowed| allowed.id != **cpu)) {
                    Some(cpu) => {
                        let may: Vec<_> = allowed.iter().map(|cpu| cpu.id.to_string()).collect();
                        let message = format!(
                            "placement: this process may not use CPU {cpu}: expected some of {}",
                            may.join(",")
                        );
                        Err(Error::new(ErrorKind::Config, message))
                    }
                    None => Ok(list.clone()),
                }
            }
            Self::Pack => {
                let mut cpus = allowed.to_vec();
                cpus.sort_by_key(|cpu| (cpu.package, cpu.core, cpu.id));
                Ok(cpus.iter().map(|cpu| cpu.id).collect())
            }
            Self::Spread => Ok(spread(allowed)),
        }
    }
}

/// Orders by how many hardware threads of the same core, then cores of the same package, precede.
fn spread(allowed: &[Cpu]) -> Vec<usize> {
    let mut cpus = allowed.to_vec();
    cpus.sort_by_key(|cpu| cpu.id);
    let mut keyed: Vec<_> = cpus
        .iter()
        .map(|cpu| {
            let same_core = |other: &&Cpu| other.package == cpu.package && other.core == cpu.core;
            let thread = cpus.iter().filter(same_core).position(|other| other.id == cpu.id);
            (*cpu, thread)
        })
        .collect();
    keyed.sort_by_key(|(cpu, thread)| (*thread, cpu.id));
    let ranked: Vec<_> = keyed
        .iter()
        .enumerate()
        .map(|(at, (cpu, thread))| {
            let before = keyed[..at].iter().filter(|(other, t)| other.package == cpu.package && t == thread);
            (*thread, before.count(), cpu.package, cpu.id)
        })
        .collect();
    let mut ranked = ranked;
    ranked.sort_unstable();
    ranked.into_iter().map(|(.., id)| id).collect()
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spread => f.write_str("spread"),
            Self::Pack => f.write_str("pack"),
            Self::None => f.write_str("none"),
            Self::List(list) => {
                let list: Vec<_> = list.iter().map(usize::to_string).collect();
                f.write_str(&list.join(","))
            }
        }
    }
}

impl FromStr for Placement {
    type Err = Error;

    /// `spread`, `pack`, `none`, or a list like `0,2,4-7`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "spread" => Ok(Self::Spread),
            "pack" => Ok(Self::Pack),
            "none" => Ok(Self::None),
            _ => cpu::parse_list(text).map(Self::List).ok_or_else(|| {
                let message = format!(
                    "invalid placement {text:?}: expected spread, pack, none or a list such as 0,2,4-7"
                );
                Error::new(ErrorKind::Config, message)
            }),
        }
    }
}

/// A CPU that the process may use, with its core and package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub(crate) id: usize,
    pub(crate) core: usize,
    pub(crate) package: usize,
}

/// Reads the core and package of each of `ids` from sysfs (`root` is `/sys/devices/system/cpu`). A
/// CPU whose files cannot be read counts as a core of its own.
pub(crate) fn topology(root: &Path, ids: &[usize]) -> Vec<Cpu> {
    let read = |id: usize, name: &str| {
        let path = root.join(format!("cpu{id}/topology/{name}"));
        std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok()
    };
    ids.iter()
        .map(|&id| Cpu {
            id,
            core: read(id, "core_id").unwrap_or(id),
            package: read(id, "physical_package_id").unwrap_or(0),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two packages of two cores with two threads each, numbered as Linux numbers them.
    fn machine() -> Vec<Cpu> {
        (0..8).map(|id| Cpu { id, core: id % 4 / 2, package: id % 2 }).collect()
    }

    #[test]
    fn spread_takes_cores_of_packages_in_turn_and_siblings_last() {
        assert_eq!(Placement::Spread.order(&machine()).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let siblings: Vec<_> = (0..4).map(|id| Cpu { id, core: id / 2, package: 0 }).collect();
        assert_eq!(Placement::Spread.order(&siblings).unwrap(), [0, 2, 1, 3]);
        let packages: Vec<_> = (0..4).map(|id| Cpu { id, core: id, package: id / 2 }).collect();
        assert_eq!(Placement::Spread.order(&packages).unwrap(), [0, 2, 1, 3]);
    }

    #[test]
    fn pack_fills_a_core_and_a_package_first() {
        assert_eq!(Placement::Pack.order(&machine()).unwrap(), [0, 4, 2, 6, 1, 5, 3, 7]);
    }

    #[test]
    fn a_cpu_list_is_used_as_given_if_allowed() {
        assert_eq!(Placement::List(vec![3, 3, 1]).order(&machine()).unwrap(), [3, 3, 1]);
        let err = Placement::List(vec![1, 9]).order(&machine()).unwrap_err();
        assert!(err.to_string().contains("CPU 9"), "{err}");
        assert!(Placement::None.order(&machine()).unwrap().is_empty());
    }

    #[test]
    fn parses_and_prints() {
        for text in ["spread", "pack", "none", "0,2,5"] {
            assert_eq!(text.parse::<Placement>().unwrap().to_string(), text);
        }
        assert_eq!("1,4-6".parse::<Placement>().unwrap(), Placement::List(vec![1, 4, 5, 6]));
        for text in ["", "x", "1-", "3-1", "0,,1", "0-99999999"] {
            assert_eq!(text.parse::<Placement>().unwrap_err().kind(), ErrorKind::Config);
        }
    }
}
