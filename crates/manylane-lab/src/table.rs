//! Tables in plain text, in the form of the paper: its lines and columns, our figures, and below
//! each line the paper's numbers. Reasons why a cell is empty are notes under the table.

use super::{Paper, Row, Scale, row};
use manylane_bench::stats::distinct;

/// All tables of `paper` that have rows, one below the other.
#[must_use]
pub fn format_tables(paper: Paper, scale: &Scale, rows: &[Row]) -> String {
    let mut text = String::new();
    for table in paper.tables(scale) {
        let own: Vec<&Row> =
            rows.iter().filter(|row| row.paper == paper && row.table == table.name).collect();
        if !own.is_empty() {
            text += &format!("{}\n\n{}\n", table.title, format_grid(&own));
        }
    }
    for row in rows.iter().filter(|row| row.paper == paper && row.table == row::FAILED_TABLE) {
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
        let at = |column: &String| rows.iter().copied().find(|row| row.line == line && row.column == *column);
        let cells = columns.iter().map(at).collect();
        (line, cells)
    });
    let lines = lines.collect();
    Grid { columns, lines }
}

fn format_grid(rows: &[&Row]) -> String {
    let Grid { columns, lines } = layout(rows);
    let mut notes: Vec<String> = Vec::new();
    let mut printed = vec![[&[String::new()][..], &columns[..]].concat()];
    for (line, cells) in &lines {
        let ours = cells.iter().map(|cell| match cell {
            None => String::new(),
            Some(Row { value: Some(value), .. }) => format_number(*value),
            Some(row) => format!("–{}", note_mark(&mut notes, row.why_not.as_deref())),
        });
        printed.push(std::iter::once(line.clone()).chain(ours).collect());
        if cells.iter().flatten().any(|cell| cell.printed.is_some()) {
            let theirs = cells
                .iter()
                .map(|cell| cell.and_then(|row| row.printed).map_or_else(String::new, format_number));
            printed.push(std::iter::once("  paper".into()).chain(theirs).collect());
        }
    }
    let mut text = align(&printed);
    for (index, note) in notes.iter().enumerate() {
        text += &format!("  [{}] {note}\n", index + 1);
    }
    text
}

/// The mark of a reason; equal reasons share a mark.
fn note_mark(notes: &mut Vec<String>, why: Option<&str>) -> String {
    let Some(why) = why else { return String::new() };
    let index = notes.iter().position(|known| known == why).unwrap_or_else(|| {
        notes.push(why.into());
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

/// A number with about three significant digits.
#[must_use]
pub fn format_number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size >= 100_000.0 => group_thousands(value),
        _ if size >= 100.0 => format!("{value:.0}"),
        _ if size >= 10.0 => format!("{value:.1}"),
        _ if size >= 1.0 => format!("{value:.2}"),
        _ if size == 0.0 => "0".into(),
        _ if size >= 0.001 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

fn group_thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "-" } else { "" });
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_that_count() {
        let cases = [
            (0.0, "0"),
            (0.16133, "0.1613"),
            (58.2, "58.2"),
            (451_300.0, "451,300"),
            (1_234_567.0, "1,234,567"),
            (999.6, "1000"),
            (0.0000123, "1.23e-5"),
            (-5.25, "-5.25"),
        ];
        for (value, text) in cases {
            assert_eq!(format_number(value), text);
        }
    }

    #[test]
    fn a_table_has_the_papers_line_below_ours_and_reasons_below_all() {
        let mut with = Row::new("t", "Atomic Increment", "ns", "ns", vec![5.5]);
        with.printed = Some(58.2);
        let rows = [
            with,
            Row::unavailable("t", "Transfer", "ns", "ns", "one processor"),
            Row::unavailable("t", "Invalidate", "ns", "ns", "one processor"),
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
            "  [1] one processor\n"
        );
        assert_eq!(format_grid(&lines), expected);
    }
}
