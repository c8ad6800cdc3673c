//! Settings of a run.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::paper::Paper;
use crate::scale::Scale;

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
