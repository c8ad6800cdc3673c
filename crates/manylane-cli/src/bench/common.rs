//! The common part of all benchmarks: the progress bar, the options, the report.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use manylane_bench::receivers::Kind;
use manylane_bench::report::{self, Figures};
use manylane_bench::schema::{BenchSettings, Document};
use manylane_bench::{Controller, Options};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::output;
use crate::progress::Progress;
use crate::signals;

/// The progress bar, and the request to stop.
pub(crate) struct Bar {
    pub(crate) progress: Progress,
    pub(crate) stop: Arc<AtomicBool>,
}

impl Bar {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { progress: Progress::bar(), stop: signals::stop_flag()? })
    }
}

impl Controller for Bar {
    fn progress(&mut self, done: f64, what: &str) {
        self.progress.show(done, what);
    }

    fn stop(&self) -> &AtomicBool {
        &self.stop
    }
}

pub(super) fn or_default<T: Copy>(given: &[T], all: &[T]) -> Vec<T> {
    if given.is_empty() { all.to_vec() } else { given.to_vec() }
}

/// The options of a benchmark, after [`check`](super::place::check).
pub(super) fn options(
    args: &BenchArgs,
    threads: &[usize],
    receivers: Vec<Kind>,
    duration: Duration,
    pps: Option<f64>,
) -> Options {
    let usual = Options::new(receivers);
    Options {
        threads: threads.to_vec(),
        sizes: or_default(&args.size, &usual.sizes),
        rounds: args.rounds,
        duration,
        pps,
        flows: args.flows.unwrap_or(usual.flows),
        // Benchmarks that compare several have them in their plans.
        batch: if let [batch] = args.batch[..] { batch } else { usual.batch },
        recv_buffer: args.recv_buffer.unwrap_or(usual.recv_buffer),
        rx_coalesce: args.rx_usecs.map(Duration::from_micros),
        steering: args.steering,
        command: output::command_line(),
        ..usual
    }
}

/// Writes the files, then prints the result.
pub(super) fn finish<R: Figures + Serialize>(
    args: &BenchArgs,
    controller: &mut Bar,
    name: &str,
    document: &Document<BenchSettings, R>,
) -> Result<()> {
    // Remove the bar before the table is printed.
    controller.progress = Progress::bar();
    let json = write(&args.out, &format!("bench-{name}.json"), &output::json(document)?)?;
    let page = write(&args.out, &format!("bench-{name}.html"), &report::html(document)?)?;
    output::eprint_line(&format!("report: {page} (raw samples: {json})"));
    if args.json {
        output::print_json(document)
    } else {
        output::print(&format!("{}\n", table(&document.rows)))
    }
}

/// Writes a file of the report, and returns its path.
pub(crate) fn write(folder: &Path, name: &str, text: &str) -> Result<String> {
    let path = folder.join(name);
    let mut file = output::create(&path)?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.display().to_string())
}

/// Text is aligned to the left, figures to the right.
fn table<R: Figures>(rows: &[R]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(R::COLUMNS);
    let lines: Vec<Vec<String>> = rows.iter().map(|row| row.cells(rows)).collect();
    for (index, column) in table.column_iter_mut().enumerate() {
        let is_figure =
            |line: &Vec<String>| line[index].starts_with(|c: char| c.is_ascii_digit() || "–≥-".contains(c));
        if lines.iter().any(is_figure) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.add_rows(lines);
    table
}

#[cfg(test)]
mod tests {
    use manylane_bench::schema::BenchRow;

    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_row() {
        let row = BenchRow::from_samples("lane/mmsg", 2, 2, 10, Vec::new());
        let text = table(&[row.clone(), row]).to_string();
        assert_eq!(text.matches("lane/mmsg").count(), 2);
        assert!(text.contains("sustained/s") && text.contains('–'));
    }
}
