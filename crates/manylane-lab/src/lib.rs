//! `manylane lab`: the experiments of published papers, on this kernel and this machine.
//!
//! ```text
//! paper ─► parts ─► each part: rows with raw samples ─► state file, at once
//!                                    │
//!                     rows of equal name are merged, the paper's numbers are added
//!                                    │
//!                     table in the paper's form ─ JSON ─ page
//! ```
//!
//! A run is a list of *parts*. A part is one round of one experiment: it takes seconds, depends on
//! no other part, and its rows are in the state file before the next one starts. So a run can be
//! stopped at any moment and resumed ([`state`]). Rounds are separate parts, so that receivers
//! alternate over the whole run. An experiment that a machine cannot do is a row with the reason
//! and no value. Where a table has a baseline, each figure has its ratio to it with the p-value of
//! the difference.
//!
//! The lab has a runner of its own, beside that of `bench`: an hour's run must survive a kill, and
//! a table has the form of its paper. Receivers, statistics and the parts of a page are those of
//! `bench`.
//!
//! | module | holds |
//! |---|---|
//! | `paper`, `settings` | the papers by name; the settings of a run, its scale |
//! | `part` | one round of one experiment; loopback and the testbed, created when a part first needs them |
//! | `row` | one figure: its place in a table, its samples, the paper's figure |
//! | [`state`] | the finished parts, in a file |
//! | [`table`], `number` | a table or a figure of a paper; tables and numbers in plain text |
//! | `congestion_hosts` | a long link, with servers of each congestion control behind it |
//! | `locks` | contention of the kernel's locks, by BPF |
//! | `cpu_distance` | whether two CPUs are two cores, by the transfer time of a cache line |
//! | `numa_nodes` | NUMA nodes, and which of them has the device |
//! | `lockstat` | acquisitions and hold times, on kernels with statistics of locks |
//! | `switch` | switches of the kernel that are changed for a measurement |
//! | `rivera`, `sarma`, `orlowsky`, `priambodo`, `salesforce` | the papers |

mod congestion_hosts;
mod cpu_distance;
mod locks;
mod lockstat;
mod numa_nodes;
mod number;
mod orlowsky;
mod paper;
mod paper_table;
mod part;
mod priambodo;
pub mod report;
mod rivera;
mod row;
mod salesforce;
mod sarma;
mod settings;
pub mod state;
mod switch;
pub mod table;

use std::time::Instant;

use anyhow::{Result, ensure};
use manylane_bench::{Controller, check_stop};
use manylane_measure::Document;

pub use self::paper::Paper;
use self::paper::PaperValue;
use self::paper_table::Table;
pub use self::part::Part;
use self::part::Setups;
pub use self::row::Row;
use self::row::merge;
pub use self::settings::{LabSettings, Scale};
use self::state::State;

/// Name of the document.
pub(crate) const SCHEMA: &str = "manylane.lab.v1";

/// The experiments of a paper.
struct Experiments {
    title: &'static str,
    tables: fn(&Scale) -> Vec<Table>,
    parts: fn(&Scale) -> Vec<Part>,
    values: fn() -> Vec<PaperValue>,
    differences: fn(&Scale) -> Vec<String>,
}

impl Paper {
    fn experiments(self) -> Experiments {
        match self {
            Self::Rivera => Experiments {
                title: "Rivera, Achá, Bustos-Jiménez, Piquer: Analysis of Linux UDP Sockets Concurrent Performance (2014)",
                tables: rivera::tables,
                parts: rivera::parts,
                values: rivera::paper_values,
                differences: rivera::differences,
            },
            Self::Sarma => Experiments {
                title: "Sarma, McKenney: Issues with Selected Scalability Features of the 2.6 Kernel (Linux Symposium 2004)",
                tables: |_| sarma::tables(),
                parts: sarma::parts,
                values: sarma::paper_values,
                differences: |_| sarma::differences(),
            },
            Self::Orlowsky => Experiments {
                title: "Orlowsky: Modifications to Linux Kernel Networking Stack (2024)",
                tables: |_| orlowsky::tables(),
                parts: orlowsky::parts,
                values: Vec::new,
                differences: |_| orlowsky::differences(),
            },
            Self::Priambodo => Experiments {
                title: "Priambodo, Ashari: Resource Modification On Multicore Server With Kernel Bypass (2020)",
                tables: |_| priambodo::tables(),
                parts: priambodo::parts,
                values: priambodo::paper_values,
                differences: |_| priambodo::differences(),
            },
            Self::Salesforce => Experiments {
                title: "Kamath, Srinivas (Salesforce): Performance Analysis of Linux Kernel Library User-Space TCP Stack (2018)",
                tables: |_| salesforce::tables(),
                parts: salesforce::parts,
                values: salesforce::paper_values,
                differences: |_| salesforce::differences(),
            },
        }
    }

    /// Authors, title, year.
    #[must_use]
    pub fn title(self) -> &'static str {
        self.experiments().title
    }

    /// Its tables and figures, in their order.
    pub(crate) fn tables(self, scale: &Scale) -> Vec<Table> {
        (self.experiments().tables)(scale)
    }

    /// The differences from the paper, with reasons.
    #[must_use]
    pub fn differences(self, scale: &Scale) -> Vec<String> {
        (self.experiments().differences)(scale)
    }
}

impl LabSettings {
    /// The parts of the run, in order.
    ///
    /// # Errors
    /// Fails if one of the texts is empty, or in the name of no part.
    pub fn selected_parts(&self) -> Result<Vec<(Paper, Part)>> {
        let parts = self.papers.iter().flat_map(|&paper| {
            (paper.experiments().parts)(&self.scale).into_iter().map(move |part| (paper, part))
        });
        let mut parts: Vec<_> = parts.collect();
        for text in &self.parts {
            let is_known = !text.is_empty() && parts.iter().any(|(_, part)| part.id.contains(text));
            ensure!(is_known, "unknown part {text:?}: see --list");
        }
        parts.retain(|(_, part)| {
            self.parts.is_empty() || self.parts.iter().any(|text| part.id.contains(text))
        });
        Ok(parts)
    }
}

/// A finished run.
pub type LabDocument = Document<LabSettings, Row>;

/// Runs the parts that `state` does not have yet, and returns all. A part that fails is a row with
/// the reason. Only a stop ends the run, and leaves the state as it is.
///
/// # Errors
/// Fails if it is stopped, a part is unknown, or the state cannot be written.
pub fn run(state: &mut State, controller: &mut dyn Controller) -> Result<LabDocument> {
    let settings = state.settings().clone();
    let parts = settings.selected_parts()?;
    let mut places = Setups::new(settings.scale.clone());
    for (index, (paper, part)) in parts.iter().enumerate() {
        if state.has(&part.id) {
            continue;
        }
        check_stop(controller.stop())?;
        controller.progress(index as f64 / parts.len() as f64, &part.id);
        let begun = Instant::now();
        let rows = (part.run)(&mut places, controller.stop());
        // An error may be caused by the stop, so that the part is not done.
        check_stop(controller.stop())?;
        let rows = rows.unwrap_or_else(|err| vec![Row::failed(&part.id, &format!("{err:#}"))]);
        let rows = rows.into_iter().map(|row| Row { paper: *paper, part: part.id.clone(), ..row }).collect();
        state.record_part(&part.id, begun.elapsed().as_secs_f64(), rows)?;
    }
    controller.progress(1.0, "done");
    Ok(to_document(state))
}

/// The contents of a state as a document.
pub(crate) fn to_document(state: &State) -> LabDocument {
    let settings = state.settings().clone();
    let mut rows = Vec::new();
    for &paper in &settings.papers {
        let own: Vec<Row> = state.rows().filter(|row| row.paper == paper).cloned().collect();
        rows.extend(merge(paper, own, &(paper.experiments().values)(), settings.parts.is_empty()));
    }
    Document { schema: SCHEMA.into(), machine: state.machine().clone(), settings, rows }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::AtomicBool;

    use crate::*;

    #[test]
    fn part_and_table_names_are_unique() {
        for scale in [Scale::quick(), Scale::full()] {
            let settings = LabSettings::new(String::new(), &Paper::ALL, Vec::new(), scale.clone());
            let parts = settings.selected_parts().unwrap();
            let names: HashSet<&str> = parts.iter().map(|(_, part)| part.id.as_str()).collect();
            assert_eq!(names.len(), parts.len());
            for (paper, part) in &parts {
                assert!(part.id.starts_with(paper.name()), "{}", part.id);
            }
            for paper in Paper::ALL {
                let tables = paper.tables(&scale);
                let names: HashSet<&str> = tables.iter().map(|table| table.name).collect();
                assert_eq!(names.len(), tables.len(), "{paper}");
                assert!(
                    (paper.experiments().values)().iter().all(|cell| names.contains(cell.table)),
                    "{paper}"
                );
                assert!(!paper.differences(&scale).is_empty(), "{paper}");
            }
        }
    }

    struct StopController(AtomicBool);

    impl Controller for StopController {
        fn progress(&mut self, _done: f64, _what: &str) {
            // In the middle of a part, which is about to see it.
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }

        fn stop(&self) -> &AtomicBool {
            &self.0
        }
    }

    #[test]
    fn an_interrupted_part_is_not_done() {
        let folder = tempfile::TempDir::new().unwrap();
        for paper in Paper::ALL {
            let settings = LabSettings::new(String::new(), &[paper], Vec::new(), Scale::quick());
            let mut state = State::create(&folder.path().join("state.jsonl"), settings).unwrap();
            let err = run(&mut state, &mut StopController(AtomicBool::new(false))).unwrap_err();
            assert!(err.to_string().contains("interrupted"), "{err:#}");
            assert_eq!(state.done_parts(), 0, "{paper}");
        }
    }
}
