//! Findings: the results of rules.

use serde::Serialize;

use super::change::Change;

/// Severity, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// Datagrams were lost.
    Loss,
    /// Limits this machine.
    Wrong,
    /// An improvement or information; nothing is wrong.
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

/// A finding of a rule.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Finding {
    /// Id of the rule.
    pub(crate) id: &'static str,
    /// The device, socket or feature concerned, if any.
    pub(crate) subject: Option<String>,
    pub(crate) severity: Severity,
    /// Cost compared with other findings, 0 to 100.
    pub(crate) cost: u8,
    /// Datagrams or frames that were lost.
    pub(crate) lost: Option<u64>,
    pub(crate) seen: String,
    pub(crate) why: String,
    /// Commands or actions.
    pub(crate) run: Vec<String>,
    /// Changes that `manylane tune` would make.
    pub(crate) changes: Vec<Change>,
    /// True if `tune` changes it only when the finding is named: the change costs other programs,
    /// or the setting was probably made on purpose.
    pub(crate) only_named: bool,
}

impl Finding {
    /// Name of the finding for `manylane tune`.
    pub(crate) fn name(&self) -> String {
        match &self.subject {
            Some(subject) => format!("{}:{subject}", self.id),
            None => self.id.into(),
        }
    }

    /// True if the user's word names it.
    pub(crate) fn is_named(&self, word: &str) -> bool {
        word == self.id || word == self.name()
    }
}

/// A rule that could not be judged.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Unknown {
    pub(crate) id: &'static str,
    pub(crate) because: String,
}

/// All findings.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Verdict {
    pub(crate) findings: Vec<Finding>,
    pub(crate) unknown: Vec<Unknown>,
}

impl Verdict {
    /// True if a finding is more than a note.
    pub(crate) fn has_problems(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity <= Severity::Wrong)
    }
}
