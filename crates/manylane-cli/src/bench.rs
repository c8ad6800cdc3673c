//! `manylane bench`: runs a benchmark, shows its table, writes its report.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use manylane_testbed::bench::flap::Event;
use manylane_testbed::bench::{self, Director, Options, Setup};
use manylane_testbed::receiver::{Kind, Work};
use manylane_testbed::report::{self, number};
use manylane_testbed::schema::{BenchRow, BenchSettings, ChurnRow, Document, FlapRow};
use manylane_testbed::testbed;

use crate::args::{BenchArgs, BenchCommand, ChurnArgs, FlapArgs, GsoArgs, PlaceArgs, RxArgs};
use crate::output;
use crate::progress::Progress;
use crate::signals;

/// Length of a sample of `bench rx`.
const SAMPLE: Duration = Duration::from_secs(1);
/// The same in a quick run: twenty receivers, five rounds, searches, all within 40 seconds.
const QUICK_SAMPLE: Duration = Duration::from_millis(100);

/// Sources of the traffic: enough for the kernel's hash to spread over eight lanes.
const FLOWS: u16 = 64;

/// Runs a benchmark.
pub(crate) fn run(bench: &BenchCommand) -> Result<()> {
    let mut director = Bar { progress: Progress::bar(), stop: signals::stop_flag()? };
    match bench {
        BenchCommand::Rx(args) => rx(args, Work::Count, &mut director),
        BenchCommand::Echo(args) => rx(args, Work::Echo, &mut director),
        BenchCommand::Gso(args) => gso(args, &mut director),
        BenchCommand::Churn(args) => churn(args, &mut director),
        BenchCommand::Flap(args) => flap(args, &mut director),
    }
}

/// The command line as it was typed, as far as that can be known.
pub(crate) fn command_line() -> String {
    let words = std::env::args().enumerate().map(|(at, word)| match at {
        0 => "manylane".into(),
        _ if word.chars().all(|c| c.is_alphanumeric() || "-_./,:=@%+[]".contains(c)) && !word.is_empty() => {
            word
        }
        _ => format!("'{}'", word.replace('\'', "'\\''")),
    });
    words.collect::<Vec<String>>().join(" ")
}

struct Bar {
    progress: Progress,
    stop: Arc<AtomicBool>,
}

impl Director for Bar {
    fn progress(&mut self, done: f64, what: &str) {
        self.progress.show(done, what);
    }

    fn stop(&self) -> &AtomicBool {
        &self.stop
    }
}

fn rx(args: &RxArgs, work: Work, director: &mut Bar) -> Result<()> {
    let duration = args.duration.unwrap_or(if args.quick { QUICK_SAMPLE } else { SAMPLE });
    let mut setup = place(&args.place, &args.common, args.interfaces)?;
    let has_device = !setup.device_names().is_empty();
    // A quick run has no time for all, and loopback has no device to take frames from; io_uring may be forbidden.
    let has_uring = manylane::probe().uring.is_ok();
    let left_out = |kind: &Kind| {
        let is_possible = (has_device || !kind.needs_device()) && (has_uring || !kind.needs_uring());
        !is_possible || (args.quick && (kind.needs_device() || kind.needs_uring()))
    };
    let usual: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| !left_out(kind)).collect();
    let receivers = or_all(&args.receivers, &usual);
    if let Some(kind) = receivers.iter().find(|kind| kind.needs_device() && !has_device) {
        bail!("{kind} takes frames from a device: it needs a testbed (root, without --loopback)");
    }
    let mut options = options(&args.common, &args.threads, receivers, duration, args.rate);
    options.quick = args.quick;
    options.work = work;
    let document = bench::rx::run(&mut setup, &options, director)?;
    let name = match work {
        Work::Count => "rx",
        Work::Echo => "echo",
    };
    finish(&args.common, director, name, &document)
}

fn gso(args: &GsoArgs, director: &mut Bar) -> Result<()> {
    let receivers = or_all(&args.receivers, &bench::gso::RECEIVERS);
    let mut options = options(&args.common, &args.threads, receivers, args.duration, args.rate.pps());
    options.flows = args.common.flows.unwrap_or(1);
    let mut setup = Setup::loopback(args.common.receiver_cpus.clone())?;
    let document = bench::gso::run(&mut setup, &options, director)?;
    finish(&args.common, director, "gso", &document)
}

fn churn(args: &ChurnArgs, director: &mut Bar) -> Result<()> {
    let options = options(&args.common, &args.threads, vec![Kind::LaneMmsg], args.duration, args.rate);
    let mut setup = place(&args.place, &args.common, 1)?;
    let document = bench::churn::run(&mut setup, &options, args.every, director)?;
    director.progress = Progress::bar();
    write(&args.common.out, "bench-churn.json", &output::json(&document)?)?;
    if args.common.json {
        return output::print_json(&document);
    }
    output::print(&churn_text(&document.rows))
}

fn flap(args: &FlapArgs, director: &mut Bar) -> Result<()> {
    let receivers = or_all(&args.receivers, &bench::flap::RECEIVERS);
    let options = options(&args.common, &args.threads, receivers, args.duration, args.rate);
    let mut setup = Setup::testbed(args.common.receiver_cpus.clone(), 1)?;
    let events = or_all(&args.events, &Event::ALL);
    let document = bench::flap::run(&mut setup, &options, &events, director)?;
    director.progress = Progress::bar();
    write(&args.common.out, "bench-flap.json", &output::json(&document)?)?;
    if args.common.json {
        return output::print_json(&document);
    }
    output::print(&format!(
        "{}\n\n- lost: entered the link, and did not reach the application\n\
         - refused: the link did not take it, because it was down\n",
        flap_table(&document.rows)
    ))
}

fn or_all<T: Copy>(given: &[T], all: &[T]) -> Vec<T> {
    if given.is_empty() { all.to_vec() } else { given.to_vec() }
}

fn options(
    args: &BenchArgs,
    threads: &[usize],
    receivers: Vec<Kind>,
    duration: Duration,
    pps: Option<f64>,
) -> Options {
    Options {
        threads: threads.to_vec(),
        sizes: args.size.clone(),
        receivers,
        work: Work::Count,
        rounds: args.rounds,
        duration,
        pps,
        flows: args.flows.unwrap_or(FLOWS),
        batch: args.batch,
        recv_buffer: args.recv_buffer.unwrap_or_else(bench::usual_recv_buffer),
        linger: args.linger.map(Duration::from_micros),
        steering: args.steering,
        quick: false,
        command: command_line(),
    }
}

/// The testbed where it can be had and nothing else was asked for, otherwise loopback.
fn place(args: &PlaceArgs, common: &BenchArgs, interfaces: usize) -> Result<Setup> {
    let cpus = common.receiver_cpus.clone();
    // Several interfaces there are in a testbed only.
    if args.testbed || interfaces > 1 {
        return Setup::testbed(cpus, interfaces);
    }
    if args.loopback {
        return Setup::loopback(cpus);
    }
    match testbed::available() {
        Ok(()) => Setup::testbed(cpus, 1),
        Err(why) => {
            output::tell(&format!("on loopback: {why:#}"));
            Setup::loopback(cpus)
        }
    }
}

/// Writes the files, then shows the result.
fn finish(
    args: &BenchArgs,
    director: &mut Bar,
    name: &str,
    document: &Document<BenchSettings, BenchRow>,
) -> Result<()> {
    // The bar goes before the table comes.
    director.progress = Progress::bar();
    let json = write(&args.out, &format!("bench-{name}.json"), &output::json(document)?)?;
    let page = write(&args.out, &format!("bench-{name}.html"), &report::html(document)?)?;
    output::tell(&format!("report: {page} (raw samples: {json})"));
    if args.json {
        return output::print_json(document);
    }
    let mut text = format!("{}\n\n", table(&document.rows));
    for sentence in report::conclusions(document) {
        text += &format!("- {sentence}\n");
    }
    output::print(&text)
}

fn write(folder: &Path, name: &str, text: &str) -> Result<String> {
    fs::create_dir_all(folder)
        .with_context(|| format!("cannot make {} (--out names another)", folder.display()))?;
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.display().to_string())
}

fn table(rows: &[BenchRow]) -> Table {
    let optional = |value: Option<f64>| value.map_or_else(|| "–".into(), number);
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "receiver",
        "threads",
        "bytes",
        "offered/s",
        "loss %",
        "receiver ns",
        "machine ns",
        "no-loss/s",
        "at twice/s",
    ]);
    for row in rows {
        let limited = if row.sender_limited == Some(true) { "≥" } else { "" };
        table.add_row([
            row.receiver.clone(),
            row.threads.to_string(),
            row.size.to_string(),
            number(row.offered_pps),
            format!("{:.3}", row.loss * 100.0),
            format!("{:.0}", row.rx_cpu_ns),
            format!("{:.0}", row.total_cpu_ns),
            format!("{limited}{}", optional(row.no_loss_pps)),
            optional(row.goodput_at_double_pps),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn flap_table(rows: &[FlapRow]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "event",
        "receiver",
        "threads",
        "bytes",
        "offered/s",
        "sent",
        "refused",
        "delivered",
        "lost",
        "lost at most",
        "kernel dropped",
        "event ms",
    ]);
    for row in rows {
        let count = |value: f64| format!("{value:.0}");
        table.add_row([
            row.event.clone(),
            row.receiver.clone(),
            row.threads.to_string(),
            row.size.to_string(),
            number(row.offered_pps),
            count(row.sent),
            count(row.refused),
            count(row.delivered),
            count(row.lost),
            row.lost_most.to_string(),
            count(row.kernel_dropped),
            format!("{:.1}", row.event_micros / 1e3),
        ]);
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn churn_text(rows: &[ChurnRow]) -> String {
    let mut text = String::new();
    for row in rows {
        text += &format!(
            "{} at {}/s: {} lanes added, {} removed, one change every {} ms; {} sent, {} delivered, \
             {} lost ({} of them dropped by the kernel at a full queue)\n",
            row.receiver,
            number(row.offered_pps),
            row.added,
            row.removed,
            row.every_ms,
            row.sent,
            row.delivered,
            row.lost,
            row.samples.iter().map(|sample| sample.kernel_dropped).sum::<u64>()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_row() {
        let row = BenchRow::of("lane/mmsg", 2, 2, 10, Vec::new());
        let text = table(&[row.clone(), row]).to_string();
        assert_eq!(text.matches("lane/mmsg").count(), 2);
        assert!(text.contains("no-loss/s") && text.contains('–'));
    }
}
