//! Tables in plain text, in the form of the paper: its lines and columns, our figures, and below
//! each line the paper's numbers and the ratios to the table's baseline. Reasons why a cell is
//! empty are notes under the table.

use manylane_bench::stats::{distinct, format_ratio};

use crate::number::format_number;
use crate::paper::Paper;
use crate::paper_table::Baseline;
use crate::row::{FAILED_TABLE, Row};
use crate::settings::Scale;

/// All tables of `paper` that have rows, one below the other.
#[must_use]
pub fn format_tables(paper: Paper, scale: &Scale, rows: &[Row]) -> String {
    let mut text = String::new();
    for table in paper.tables(scale) {
        let own = table.rows(paper, rows);
        if !own.is_empty() {
            text += &format!("{}\n\n{}\n", table.title, print(&own, table.baseline).text());
        }
    }
    for row in rows.iter().filter(|row| row.paper == paper && row.table == FAILED_TABLE) {
        text += &format!("{} failed: {}\n", row.line, row.why_not.as_deref().unwrap_or_default());
    }
    text
}

/// The header and the lines of one table: names, then a cell for each of the columns.
pub(crate) struct Grid<'a> {
    pub(crate) columns: Vec<String>,
    pub(crate) lines: Vec<(String, Vec<Option<&'a Row>>)>,
}

pub(crate) fn layout<'a>(rows: &[&'a Row]) -> Grid<'a> {
    let columns = distinct(rows.iter().map(|row| row.column.clone()));
    let lines = distinct(rows.iter().map(|row| row.line.clone()));
    let lines = lines.into_iter().map(|line| {
        let cells = columns.iter().map(|column| find(rows, &line, column)).collect();
        (line, cells)
    });
    let lines = lines.collect();
    Grid { columns, lines }
}

fn find<'a>(rows: &[&'a Row], line: &str, column: &str) -> Option<&'a Row> {
    rows.iter().copied().find(|row| row.line == line && row.column == column)
}

/// A table as text.
pub(crate) struct Printed {
    pub(crate) header: Vec<String>,
    pub(crate) lines: Vec<Vec<String>>,
    /// Numbered notes: why a cell is empty, or what was lost.
    pub(crate) notes: Vec<String>,
}

/// Our figures; below each line those of the paper, and the ratios to the baseline.
pub(crate) fn print(rows: &[&Row], baseline: Option<Baseline>) -> Printed {
    let Grid { columns, lines } = layout(rows);
    let (mut notes, mut printed) = (Vec::new(), Vec::new());
    for (line, cells) in &lines {
        let ours = cells.iter().map(|cell| {
            let Some(row) = cell else { return String::new() };
            let value = row.value.map_or_else(|| "–".into(), format_number);
            let note = if row.value.is_some() { row.losses() } else { row.why_not.clone() };
            value + &note_mark(&mut notes, note)
        });
        let ours = std::iter::once(line.clone()).chain(ours).collect();
        printed.push(ours);
        let paper = |cell: &Option<&Row>| cell.and_then(|row| row.printed).map(format_number);
        let ratio = |cell: &Option<&Row>| {
            let row = cell.filter(|row| row.value.is_some())?;
            let base = match baseline? {
                Baseline::Line(line) => find(rows, line, &row.column),
                Baseline::Column(column) => find(rows, &row.line, column),
            };
            let base = base.filter(|base| !std::ptr::eq(*base, row) && base.value.is_some())?;
            Some(format_ratio(&row.samples, &base.samples))
        };
        for (name, texts) in [
            ("  paper", cells.iter().map(paper).collect::<Vec<_>>()),
            ("  ratio (p)", cells.iter().map(ratio).collect()),
        ] {
            if texts.iter().any(Option::is_some) {
                let texts = texts.into_iter().map(Option::unwrap_or_default);
                printed.push(std::iter::once(name.into()).chain(texts).collect());
            }
        }
    }
    Printed { header: [&[String::new()][..], &columns[..]].concat(), lines: printed, notes }
}

/// Checks that `rows` have cells of the named table to compare with its baseline, and the baseline.
/// Without it the table would just have no ratios.
#[cfg(test)]
pub(crate) fn assert_compared(paper: Paper, name: &str, rows: &[Row]) {
    let tables = paper.tables(&Scale::quick());
    let table = tables.iter().find(|table| table.name == name).unwrap();
    let own: Vec<&Row> = rows.iter().filter(|row| row.table == name).collect();
    let text = print(&own, table.baseline).text();
    assert!(text.contains("ratio (p)"), "{name}:\n{text}");
}

impl Printed {
    fn text(&self) -> String {
        let mut text = align(&[std::slice::from_ref(&self.header), &self.lines[..]].concat());
        for (index, note) in self.notes.iter().enumerate() {
            text += &format!("  [{}] {note}\n", index + 1);
        }
        text
    }
}

/// The mark of a note; equal notes share a mark.
fn note_mark(notes: &mut Vec<String>, note: Option<String>) -> String {
    let Some(note) = note else { return String::new() };
    let index = notes.iter().position(|known| *known == note).unwrap_or_else(|| {
        notes.push(note);
        notes.len() - 1
    });
    format!(" [{}]", index + 1)
}

/// The first column is left-aligned, the others are right-aligned.
fn align(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let length = |text: &str| text.chars().count();
    let width =
        |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| length(cell)).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in lines {
        let mut out = String::new();
        for (column, cell) in line.iter().enumerate() {
            let room = " ".repeat(widths[column] - length(cell));
            out += &if column == 0 { format!("{cell}{room}") } else { format!("  {room}{cell}") };
        }
        text += out.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_papers_line_and_reasons_below() {
        let mut with = Row::new("t", "Atomic Increment", "ns", "ns", vec![5.5]);
        with.printed = Some(58.2);
        let rows = [
            with,
            Row::unavailable("t", "Transfer", "ns", "ns", "one CPU"),
            Row::unavailable("t", "Invalidate", "ns", "ns", "one CPU"),
            Row::new("t", "Ours alone", "ns", "ns", vec![7.0]),
        ];
        let lines: Vec<&Row> = rows.iter().collect();
        let expected = concat!(
            "                     ns\n",
            "Atomic Increment   5.50\n",
            "  paper            58.2\n",
            "Transfer          – [1]\n",
            "Invalidate        – [1]\n",
            "Ours alone         7.00\n",
            "  [1] one CPU\n"
        );
        assert_eq!(print(&lines, None).text(), expected);
    }

    #[test]
    fn each_value_has_its_ratio_to_the_baseline_and_its_losses() {
        let (low, high) = (vec![1., 2., 3., 4., 5.], vec![6., 7., 8., 9., 10.]);
        let row = |line: &str, samples: &Vec<f64>| Row::new("t", line, "s", "s", samples.clone());
        let lossy = row("two", &low).with_counts(&[("sent", 100), ("delivered", 97)]);
        let rows = [row("one", &high), lossy, Row::unavailable("t", "three", "s", "s", "no device")];
        let lines: Vec<&Row> = rows.iter().collect();
        let expected = concat!(
            "                        s\n",
            "one                  8.00\n",
            "two              3.00 [1]\n",
            "  ratio (p)  0.38 (0.008)\n",
            "three               – [2]\n",
            "  [1] 3 of 100 lost\n",
            "  [2] no device\n"
        );
        assert_eq!(print(&lines, Some(Baseline::Line("one"))).text(), expected);
        assert!(!print(&lines, Some(Baseline::Line("four"))).text().contains("ratio"));
    }
}
