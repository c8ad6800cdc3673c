//! What rules find.

use serde::{Deserialize, Serialize};

use super::change::Change;

/// How bad it is; the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Datagrams were lost.
    Loss,
    /// Holds this machine back.
    Wrong,
    /// Could be better, or is good to know; nothing is wrong.
    Note,
}

impl Severity {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Loss => "LOSS",
            Self::Wrong => "WRONG",
            Self::Note => "note",
        }
    }
}

/// Something that a rule found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Finding {
    /// Of the rule.
    pub(crate) id: &'static str,
    /// The device, socket or feature that it is about, if it is about one.
    pub(crate) subject: Option<String>,
    pub(crate) severity: Severity,
    /// What it costs compared to others, 0 to 100.
    pub(crate) cost: u8,
    /// Datagrams or frames that were lost.
    pub(crate) lost: Option<u64>,
    pub(crate) seen: String,
    pub(crate) why: String,
    /// What to run or do.
    pub(crate) run: Vec<String>,
    /// What `manylane tune` would set.
    pub(crate) changes: Vec<Change>,
    /// It sets that only if the finding is named: others pay for it, or somebody had a reason.
    pub(crate) only_named: bool,
}

impl Finding {
    /// By which `manylane tune` knows it.
    pub(crate) fn name(&self) -> String {
        match &self.subject {
            Some(subject) => format!("{}:{subject}", self.id),
            None => self.id.into(),
        }
    }

    /// Whether a word of the user's means it.
    pub(crate) fn is_named(&self, word: &str) -> bool {
        word == self.id || word == self.name()
    }
}

/// Something that could not be judged.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Unknown {
    pub(crate) id: &'static str,
    pub(crate) because: String,
}

/// All that was found.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Verdict {
    pub(crate) findings: Vec<Finding>,
    pub(crate) unknown: Vec<Unknown>,
}

impl Verdict {
    /// Whether something is wrong.
    pub(crate) fn has_problems(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity <= Severity::Wrong)
    }
}
