//! Settings of a run, with its scale.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::number::format_number;
use crate::paper::Paper;

/// Settings of a lab run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LabSettings {
    /// The command line of the run that finished it.
    pub command: String,
    /// Time of the start, in seconds since 1970.
    pub started_unix: u64,
    /// The papers.
    pub papers: Vec<Paper>,
    /// The parts: those whose names contain one of these texts; empty: all.
    pub parts: Vec<String>,
    /// The scale of the run.
    pub scale: Scale,
}

impl LabSettings {
    /// Settings of a run that begins now.
    #[must_use]
    pub fn new(command: String, papers: &[Paper], parts: Vec<String>, scale: Scale) -> Self {
        let started_unix = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        Self { command, started_unix, papers: papers.to_vec(), parts, scale }
    }
}

/// The scale of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// Each paper within a minute.
    pub quick: bool,
    /// Rounds of every experiment that has rounds.
    pub rounds: usize,
    /// Total number of units that the readers of one run receive.
    pub units: u64,
    /// Length of a traffic sample, in milliseconds.
    pub sample_ms: u64,
    /// Length of a flood, in milliseconds.
    pub flood_ms: u64,
}

impl Scale {
    /// As the papers have it.
    #[must_use]
    pub fn full() -> Self {
        Self { quick: false, rounds: 9, units: 500_000, sample_ms: 1000, flood_ms: 60_000 }
    }

    /// Notes for the reader of the figures.
    #[must_use]
    pub fn describe(&self) -> String {
        let seconds = |ms: u64| match ms {
            0..1000 => format!("{ms} ms"),
            _ => format!("{} s", ms as f64 / 1e3),
        };
        let much = format!(
            "{} rounds, {} units, samples of {}, floods of {}",
            self.rounds,
            format_number(self.units as f64),
            seconds(self.sample_ms),
            seconds(self.flood_ms)
        );
        format!("{}: {much}.", if self.quick { "Quick run" } else { "Scale" })
    }

    /// Each paper within a minute.
    #[must_use]
    pub fn quick() -> Self {
        Self { quick: true, rounds: 2, units: 25_000, sample_ms: 300, flood_ms: 2000 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_states_its_size_and_quick_mode() {
        let quick = Scale::quick().describe();
        assert!(
            quick.starts_with("Quick run: 2 rounds")
                && quick.ends_with("25000 units, samples of 300 ms, floods of 2 s."),
            "{quick}"
        );
        let full = Scale { flood_ms: 2500, ..Scale::full() }.describe();
        assert_eq!(full, "Scale: 9 rounds, 500,000 units, samples of 1 s, floods of 2.5 s.");
    }
}
