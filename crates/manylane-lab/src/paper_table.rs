//! A table or a figure of a paper: its title, its plot, its baseline.

use crate::paper::Paper;
use crate::row::Row;

/// A table or a figure of a paper.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Table {
    /// Its name in rows.
    pub name: &'static str,
    /// Its title.
    pub title: String,
    /// Plot on the page, over its columns.
    pub plot: Option<Plot>,
    /// Baseline of its figures.
    pub baseline: Option<Baseline>,
}

impl Table {
    pub(crate) fn new(name: &'static str, title: impl Into<String>, plot: Option<Plot>) -> Self {
        Self { name, title: title.into(), plot, baseline: None }
    }

    pub(crate) fn compared_with(self, baseline: Baseline) -> Self {
        Self { baseline: Some(baseline), ..self }
    }

    pub(crate) fn rows<'a>(&self, paper: Paper, rows: &'a [Row]) -> Vec<&'a Row> {
        rows.iter().filter(|row| row.paper == paper && row.table == self.name).collect()
    }
}

/// The cells that those of a table are compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Baseline {
    /// The cell of the same column in this line.
    Line(&'static str),
    /// The cell of the same line in this column.
    Column(&'static str),
}

/// Plot of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plot {
    /// A line of the plot for each line of the table, and the name of the column axis.
    Lines(&'static str),
    /// A group of bars for each column.
    Bars(&'static str),
}
