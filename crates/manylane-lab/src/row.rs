//! One figure of a table: its place, its value, its samples, and the paper's number.

use std::collections::BTreeMap;
use std::fmt::Display;

use manylane_bench::stats::median;
use serde::{Deserialize, Serialize};

use crate::paper::{Paper, PaperValue};

/// One cell of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The paper.
    pub paper: Paper,
    /// The part that measured it; the first one, if there are several.
    pub part: String,
    /// Table or figure.
    pub table: String,
    /// Line of the table.
    pub line: String,
    /// Column of the table.
    pub column: String,
    /// Unit of all values.
    pub unit: String,
    /// Median of the samples; null if there are none.
    pub value: Option<f64>,
    /// The paper's number, if it has one.
    pub printed: Option<f64>,
    /// The reason why there is no value.
    pub why_not: Option<String>,
    /// The raw samples.
    pub samples: Vec<f64>,
    /// Counters of the measurement, summed over the samples.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counts: BTreeMap<String, u64>,
}

impl Row {
    /// A cell with samples. Paper and part are filled in after the part has run.
    pub(crate) fn new(table: &str, line: &str, column: &str, unit: &str, samples: Vec<f64>) -> Self {
        let value = (!samples.is_empty()).then(|| median(samples.iter().copied()));
        Self {
            paper: Paper::Rivera,
            part: String::new(),
            table: table.into(),
            line: line.into(),
            column: column.into(),
            unit: unit.into(),
            value,
            printed: None,
            why_not: None,
            samples,
            counts: BTreeMap::new(),
        }
    }

    /// A cell that cannot be measured on this machine.
    pub(crate) fn unavailable(table: &str, line: &str, column: &str, unit: &str, why: &str) -> Self {
        Self { why_not: Some(why.into()), ..Self::new(table, line, column, unit, Vec::new()) }
    }

    /// A cell with one sample, or with the reason why there is none.
    pub(crate) fn measured<E: Display>(
        table: &str,
        line: &str,
        column: &str,
        unit: &str,
        value: Result<f64, E>,
    ) -> Self {
        match value {
            Ok(value) => Self::new(table, line, column, unit, vec![value]),
            Err(why) => Self::unavailable(table, line, column, unit, &format!("{why:#}")),
        }
    }

    /// A part that failed as a whole.
    pub(super) fn failed(part: &str, why: &str) -> Self {
        Self::unavailable(FAILED_TABLE, part, "", "", why)
    }

    /// Adds counters.
    pub(crate) fn with_counts(mut self, counts: &[(&str, u64)]) -> Self {
        self.counts.extend(counts.iter().map(|&(name, count)| (name.to_owned(), count)));
        self
    }

    /// Lost datagrams of a measurement, if any.
    pub(super) fn losses(&self) -> Option<String> {
        let count = |name: &str| self.counts.get(name).copied();
        let (sent, delivered) = (count("sent")?, count("delivered")?);
        (delivered < sent).then(|| format!("{} of {sent} lost", sent - delivered))
    }

    fn is_same_cell(&self, other: &Self) -> bool {
        (&self.table, &self.line, &self.column) == (&other.table, &other.line, &other.column)
    }

    fn merge_from(&mut self, other: Self) {
        self.samples.extend(other.samples);
        self.value = (!self.samples.is_empty()).then(|| median(self.samples.iter().copied()));
        for (name, count) in other.counts {
            *self.counts.entry(name).or_default() += count;
        }
        // A failed round does not discard the others; it stays visible.
        self.why_not = self.why_not.take().or(other.why_not);
    }
}

/// The table of parts that failed.
pub(crate) const FAILED_TABLE: &str = "failed";

/// Merges rows of one paper with equal places, and adds the paper's numbers. If `all` parts ran,
/// numbers of the paper that were not measured are rows, too.
pub(crate) fn merge(paper: Paper, rows: Vec<Row>, printed: &[PaperValue], all: bool) -> Vec<Row> {
    let mut merged: Vec<Row> = Vec::new();
    for row in rows {
        match merged.iter_mut().find(|known| known.is_same_cell(&row)) {
            Some(known) => known.merge_from(row),
            None => merged.push(row),
        }
    }
    for cell in printed {
        let at =
            |row: &&mut Row| (&*row.table, &*row.line, &*row.column) == (cell.table, cell.line, cell.column);
        match merged.iter_mut().find(at) {
            Some(row) => row.printed = Some(cell.value),
            None if all => merged.push(Row {
                paper,
                printed: Some(cell.value),
                ..Row::unavailable(cell.table, cell.line, cell.column, "", "not measured in this run")
            }),
            None => {}
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_merged_and_the_paper_stands_beside() {
        let cell = |value| Row::new("t", "a", "1", "s", vec![value]).with_counts(&[("sent", 10)]);
        let printed = [
            PaperValue { table: "t", line: "a", column: "1", value: 7.0 },
            PaperValue { table: "t", line: "b", column: "1", value: 8.0 },
        ];
        let rows = vec![cell(3.0), Row::unavailable("t", "c", "1", "s", "no device"), cell(1.0), cell(2.0)];
        let merged = merge(Paper::Sarma, rows, &printed, true);
        assert_eq!(merged.len(), 3);
        assert_eq!((merged[0].value, merged[0].printed), (Some(2.0), Some(7.0)));
        assert_eq!(merged[0].samples, [3.0, 1.0, 2.0]);
        assert_eq!(merged[0].counts["sent"], 30);
        assert_eq!((merged[1].value, merged[1].why_not.as_deref()), (None, Some("no device")));
        assert_eq!(
            (merged[2].line.as_str(), merged[2].printed, merged[2].paper),
            ("b", Some(8.0), Paper::Sarma)
        );
    }

    #[test]
    fn a_partial_run_does_not_list_skipped_parts() {
        let printed = [PaperValue { table: "t", line: "b", column: "1", value: 8.0 }];
        assert_eq!(merge(Paper::Sarma, Vec::new(), &printed, false), []);
    }

    #[test]
    fn a_round_that_failed_leaves_the_others_their_median() {
        let rows =
            vec![Row::new("t", "a", "1", "s", vec![4.0]), Row::unavailable("t", "a", "1", "s", "busy")];
        let merged = merge(Paper::Rivera, rows, &[], true);
        assert_eq!((merged[0].value, merged[0].why_not.as_deref()), (Some(4.0), Some("busy")));
    }
}
