//! `manylane bench flood`.

use std::time::Duration;

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use manylane_bench::experiments::flood::{self, LINKS, Part, Plan};
use manylane_bench::report;
use manylane_bench::schema::FloodRow;
use manylane_bench::stats::median;
use manylane_bench::{Options, Setup};
use manylane_measure::format_number;

use super::{Bar, options, or_default, write};
use crate::args::FloodArgs;
use crate::output::{self, UsageError};
use crate::progress::Progress;

/// Length of a sample of parts `clients` and `program`.
const SAMPLE_DURATION: Duration = Duration::from_millis(1500);
const QUICK_SAMPLE_DURATION: Duration = Duration::from_millis(300);
/// Time with new sources.
const SOURCES_DURATION: Duration = Duration::from_secs(60);
const QUICK_SOURCES_DURATION: Duration = Duration::from_secs(5);

pub(super) fn run(args: &FloodArgs, director: &mut Bar) -> Result<()> {
    if !args.common.size.is_empty() {
        return Err(UsageError("--size: the requests of bench flood have 32 bytes".into()).into());
    }
    let scaled =
        |given: Option<Duration>, quick, usual| given.unwrap_or(if args.quick { quick } else { usual });
    let duration = scaled(args.duration, QUICK_SAMPLE_DURATION, SAMPLE_DURATION);
    let plan = Plan {
        parts: or_default(&args.parts, &Part::ALL),
        limit: args.limit,
        sources: scaled(args.sources, QUICK_SOURCES_DURATION, SOURCES_DURATION),
    };
    let mut setup = Setup::testbed(args.common.receiver_cpus.clone(), LINKS)?;
    let options = Options {
        quick: args.quick,
        sizes: vec![32],
        ..options(&args.common, &[1], Vec::new(), duration, args.rate)
    };
    let document = flood::run(&mut setup, &options, &plan, director)?;
    director.progress = Progress::bar();
    let json = write(&args.common.out, "bench-flood.json", &output::json(&document)?)?;
    let page = write(&args.common.out, "bench-flood.html", &report::flood::html(&document)?)?;
    output::eprint_line(&format!("report: {page} (raw samples: {json})"));
    if args.common.json {
        return output::print_json(&document);
    }
    let mut text = format!("{}\n\n", table(&document.rows));
    for sentence in report::flood::conclusions(&document.rows) {
        text += &format!("- {sentence}\n");
    }
    output::print(&text)
}

fn table(rows: &[FloodRow]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "part",
        "variant",
        "receiver",
        "sent/s",
        "answered %",
        "p99 ms",
        "longest ms",
        "unstolen ms",
        "over 1 ms/s",
        "ran %",
        "grown KiB",
    ]);
    for row in rows {
        let optional = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "–".into(), |value| format!("{value:.digits$}"))
        };
        let who = if row.part == "sources" { "lane" } else { "program" };
        let has_pauses = row.pauses(who).next().is_some();
        let of_pauses = |value: f64| has_pauses.then_some(value);
        let late = row.samples.iter().filter_map(|seen| seen.clients).map(|clients| clients.p99_ms);
        table.add_row([
            row.part.clone(),
            row.variant.clone(),
            row.figures.receiver.clone(),
            format_number(row.figures.offered_pps),
            optional(row.answered.map(|share| 100.0 * share), 1),
            optional(row.answered.map(|_| median(late)), 1),
            optional(row.longest_ms, 1),
            optional(row.longest_unstolen_ms, 1),
            optional(of_pauses(median(row.pauses(who).map(|seen| seen.over_1ms_per_second()))), 1),
            optional(
                row.longest_unstolen_ms
                    .map(|_| 100.0 * median(row.pauses(who).filter_map(|seen| seen.share))),
                0,
            ),
            row.grown_kib.map_or_else(|| "–".into(), |grown| grown.to_string()),
        ]);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
