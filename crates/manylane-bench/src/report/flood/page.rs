//! The page about a run of `bench flood`: a section for each part.

use std::fmt::Write as _;

use anyhow::Result;

use super::{SENDER_CPU_PROGRAM, conclusions};
use crate::report::common::{PlotLabels, page, samples, table};
use crate::report::format_number;
use crate::schema::{BenchSettings, Document, FloodClients, FloodPauses, FloodRow};

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn html(document: &Document<BenchSettings, FloodRow>) -> Result<String> {
    page(document, &conclusions(&document.rows), |page| {
        for (part, title, draw) in [
            (
                "clients",
                "Regular clients beside a flood",
                clients as fn(&mut String, &[&FloodRow]) -> Result<()>,
            ),
            ("sources", "New sources without end", sources),
            ("program", "A program that wants to run beside a flood", program),
        ] {
            let rows: Vec<&FloodRow> = document.rows.iter().filter(|row| row.part == part).collect();
            if rows.is_empty() {
                continue;
            }
            writeln!(page, "<section><h2>{title}</h2>")?;
            draw(page, &rows)?;
            metrics_table(page, &rows);
            page.push_str("</section>\n");
        }
        Ok(())
    })
}

fn variants(rows: &[&FloodRow]) -> Vec<String> {
    rows.iter().map(|row| row.variant.clone()).collect()
}

fn clients(page: &mut String, rows: &[&FloodRow]) -> Result<()> {
    let of = |place: usize, value: fn(&FloodClients) -> f64| -> Vec<f64> {
        rows[place].samples.iter().filter_map(|seen| seen.clients.as_ref()).map(value).collect()
    };
    let words =
        PlotLabels { title: "Requests that were answered", caption: "Higher is better.", x: "flood", y: "%" };
    samples(page, words, &variants(rows), &["answered"], |_, place| of(place, |seen| 100.0 * seen.share()))?;
    let words =
        PlotLabels { title: "How long answers took", caption: "Lower is better.", x: "flood", y: "ms" };
    let value: [fn(&FloodClients) -> f64; 2] = [|seen| seen.p50_ms, |seen| seen.p99_ms];
    samples(page, words, &variants(rows), &["half of them (p50)", "99 % of them (p99)"], |name, place| {
        of(place, value[name])
    })
}

fn sources(page: &mut String, rows: &[&FloodRow]) -> Result<()> {
    let names: Vec<&str> = rows.iter().map(|row| row.variant.as_str()).collect();
    let seconds = |row: &&FloodRow| {
        row.samples.iter().filter_map(|seen| seen.memory.as_ref()).map(|seen| seen.rss_kib.len()).max()
    };
    let most = rows.iter().filter_map(seconds).max().unwrap_or(0);
    let places: Vec<String> = (1..=most).map(|second| second.to_string()).collect();
    let words = PlotLabels {
        title: "Memory of the process, against the first second of all",
        caption: "Of each round.",
        x: "second of the round",
        y: "KiB",
    };
    samples(page, words, &places, &names, |name, second| {
        let all = || rows[name].samples.iter().filter_map(|seen| seen.memory.as_ref());
        let first = all().find_map(|seen| seen.rss_kib.first().copied()).unwrap_or(0);
        // A plot begins at zero, which also stands for memory that was freed.
        all()
            .filter_map(|seen| seen.rss_kib.get(second))
            .map(|kib| kib.saturating_sub(first) as f64)
            .collect()
    })?;
    let who = ["lane", "observer", "sender"];
    let words = PlotLabels {
        title: "Pauses of more than a millisecond",
        caption: "Between two calls of the lane's closure, of a thread beside it that sleeps 100 µs at a time, of the sender.",
        x: "load",
        y: "in a second",
    };
    samples(page, words, &variants(rows), &who, |name, place| {
        rows[place].pauses(who[name]).map(FloodPauses::over_1ms_per_second).collect()
    })
}

fn program(page: &mut String, rows: &[&FloodRow]) -> Result<()> {
    let names = ["on the lane's processor", "without what the hypervisor took"];
    let words = PlotLabels {
        title: "The longest time that the program was kept from running, on the lane's processor",
        caption: "10 ms is the aim. Lower is better.",
        x: "flood",
        y: "ms",
    };
    samples(page, words, &variants(rows), &names, |name, place| {
        let of = |seen: &FloodPauses| [Some(seen.longest_ms), seen.longest_unstolen_ms][name];
        rows[place].pauses("program").filter_map(of).collect()
    })?;
    let names = ["on the sender's processor", "without the sender's turns and what the hypervisor took"];
    let words = PlotLabels { title: "The same on the sender's processor", ..words };
    samples(page, words, &variants(rows), &names, |name, place| {
        let of = |seen: &FloodPauses| [Some(seen.longest_ms), seen.longest_apart_ms][name];
        rows[place].pauses(SENDER_CPU_PROGRAM).filter_map(of).collect()
    })?;
    let names = ["on the lane's processor", "on the sender's processor"];
    let words = PlotLabels {
        title: "How much of the processor it had",
        caption: "Higher is better.",
        x: "flood",
        y: "%",
    };
    samples(page, words, &variants(rows), &names, |name, place| {
        let share = |seen: &FloodPauses| seen.share.map(|share| 100.0 * share);
        rows[place].pauses(["program", SENDER_CPU_PROGRAM][name]).filter_map(share).collect()
    })
}

fn metrics_table(page: &mut String, rows: &[&FloodRow]) {
    let optional = |value: Option<f64>| value.map_or_else(|| "–".into(), |value| format!("{value:.1}"));
    let line = |row: &&FloodRow| {
        vec![
            row.variant.clone(),
            row.figures.receiver.clone(),
            format_number(row.figures.offered_pps),
            format_number(row.figures.delivered_pps),
            optional(row.answered.map(|share| 100.0 * share)),
            optional(row.longest_ms),
            optional(row.longest_unstolen_ms),
            row.grown_kib.map_or_else(|| "–".into(), |grown| grown.to_string()),
        ]
    };
    let header = [
        "flood",
        "receiver",
        "sent/s",
        "delivered/s",
        "answered %",
        "longest ms",
        "unstolen ms",
        "grown KiB",
    ];
    table(page, &header, &rows.iter().map(line).collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;
    use crate::schema::{BENCH_FLOOD, FloodMemory, FloodSample};

    fn row(part: &str, variant: &str, change: impl Fn(&mut FloodSample)) -> FloodRow {
        let samples = (0..3).map(|round| {
            let mut seen = sample(round);
            change(&mut seen);
            seen
        });
        FloodRow::from_samples(part, variant, "lane/xdp", 32, samples.collect())
    }

    fn pauses(who: &str, apart: Option<f64>) -> FloodPauses {
        FloodPauses {
            who: who.into(),
            seconds: 1.0,
            longest_ms: 12.5,
            longest_unstolen_ms: Some(11.5),
            longest_apart_ms: apart,
            over_1ms: 4,
            share: Some(0.5),
            ..FloodPauses::default()
        }
    }

    #[test]
    fn each_part_has_its_plots_and_all_rows() {
        let asked = FloodClients { asked: 100, answered: 90, p50_ms: 0.2, p99_ms: 3.0 };
        let memory =
            || FloodMemory { new_sources: 1000, rss_kib: vec![500, 400, 510], slab_kib: vec![1, 1, 1] };
        let rows = vec![
            row("clients", "no-<limit>", |seen| seen.clients = Some(asked)),
            row("sources", "new-sources", |seen| {
                seen.memory = Some(memory());
                seen.pauses = vec![pauses("lane", None), pauses("observer", None)];
            }),
            row("program", "limit", |seen| {
                seen.pauses = vec![pauses("program", None), pauses(SENDER_CPU_PROGRAM, Some(0.5))];
            }),
        ];
        let settings = BenchSettings { command: "manylane bench flood '<&>'".into(), ..Default::default() };
        let document = Document::new(BENCH_FLOOD, settings, rows);
        let page = html(&document).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert_eq!((page.matches("<svg").count(), page.matches("<tr").count()), (2 + 2 + 3, 3 * 2));
        assert!(
            page.contains("no-&lt;limit&gt;") && !page.contains("no-<limit>") && !page.contains("<script")
        );
        for sentence in conclusions(&document.rows) {
            assert!(page.contains(&crate::report::escape(&sentence)), "{sentence}");
        }
        // A part that did not run has no section, and no empty plots.
        let only = Document::new(BENCH_FLOOD, BenchSettings::default(), document.rows[..1].to_vec());
        let page = html(&only).unwrap();
        assert!(page.matches("<svg").count() == 2 && !page.contains("New sources without end"));
    }
}
