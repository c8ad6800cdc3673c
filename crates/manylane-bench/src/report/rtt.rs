//! The page about `bench rtt`: times and cost of each contender, compared with the one that blocks
//! in `recvfrom`.

use std::fmt::Write as _;

use anyhow::Result;

use super::{about, escape, figure, format_number, plots, subtitle};
use crate::schema::{BenchSettings, Document, RttRow};
use crate::stats::{Summary, distinct, mann_whitney};

/// The contender that all are compared with, as most servers work this way.
const BASELINE: (&str, &str) = ("socket/recvfrom", "sleep");

/// Sentences computed from the rows.
#[must_use]
pub fn conclusions(rows: &[RttRow]) -> Vec<String> {
    let busy = || rows.iter().filter(|row| row.mode != "idle");
    let like = |row: &RttRow, receiver: &str, is_wait: &dyn Fn(&str) -> bool| {
        busy().find(|other| {
            is_wait(&other.wait)
                && (other.figures.receiver == receiver && other.placement == row.placement)
                && (other.mode == row.mode
                    && other.rate == row.rate
                    && other.figures.size == row.figures.size)
        })
    };
    let mut said = Vec::new();
    for row in busy().filter(|row| row.mode == "ping-pong") {
        let Some(base) = like(row, BASELINE.0, &|wait| wait == BASELINE.1) else { continue };
        if std::ptr::eq(row, base) {
            continue;
        }
        said.push(format!(
            "{}, {}: {} answers in {:.1} µs (p50) and {:.1} µs (p99), {} and {} of {}+{}.",
            row.placement,
            row.mode,
            row.contender(),
            row.rtt.p50_ns / 1e3,
            row.rtt.p99_ns / 1e3,
            compare(row, base, |sample| sample.rtt.p50_ns),
            compare(row, base, |sample| sample.rtt.p99_ns),
            BASELINE.0,
            BASELINE.1,
        ));
    }
    for row in busy().filter(|row| row.wait == "adaptive") {
        let Some(spin) = like(row, &row.figures.receiver, &|wait| wait.starts_with("spin")) else { continue };
        said.push(format!(
            "{}, {}: {} keeps {:.2} processors busy where {} keeps {:.2}, for {} of its p99.",
            row.placement,
            row.load(),
            row.contender(),
            row.rtt.server_cores,
            spin.wait,
            spin.rtt.server_cores,
            compare(row, spin, |sample| sample.rtt.p99_ns),
        ));
    }
    for row in rows.iter().filter(|row| row.mode == "idle" && row.wait == "adaptive") {
        said.push(format!(
            "{} costs {:.3} % of a processor while idle.",
            row.contender(),
            row.rtt.server_cores * 100.0
        ));
    }
    said
}

/// Compares `row` with `other`, and says whether the difference may be chance.
fn compare(row: &RttRow, other: &RttRow, value: fn(&crate::schema::RttSample) -> f64) -> String {
    let of = |row: &RttRow| row.samples.iter().map(value).collect::<Vec<f64>>();
    let (mine, theirs) = (of(row), of(other));
    let middle =
        |all: &[f64]| Summary::from_samples(all.iter().copied()).map_or(0.0, |summary| summary.median);
    let ratio = middle(&mine) / middle(&theirs).max(1.0);
    let p = mann_whitney(&mine, &theirs);
    if p > 0.05 { format!("{ratio:.2} (may be chance, p = {p:.2})") } else { format!("{ratio:.2}") }
}

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn html(document: &Document<BenchSettings, RttRow>) -> Result<String> {
    let mut page = String::with_capacity(256 << 10);
    write!(page, include_str!("head.html"), title = "manylane bench rtt")?;
    write!(page, "<h1>manylane bench rtt</h1>\n<p class=lead>{}</p>\n", escape(&subtitle(document)))?;
    let sizes = distinct(document.rows.iter().map(|row| row.figures.size));
    let placements = distinct(document.rows.iter().map(|row| row.placement.clone()));
    for &size in &sizes {
        for placement in &placements {
            let rows: Vec<RttRow> = document
                .rows
                .iter()
                .filter(|row| row.figures.size == size && row.placement == *placement)
                .cloned()
                .collect();
            section(&mut page, &format!("{placement}, requests of {size} bytes"), &rows)?;
        }
    }
    about(&mut page, document)?;
    page += "</main></body></html>\n";
    Ok(page)
}

fn section(page: &mut String, title: &str, rows: &[RttRow]) -> Result<()> {
    writeln!(page, "<section><h2>{}</h2>\n<h3>What this run says</h3>\n<ul class=says>", escape(title))?;
    for sentence in conclusions(rows) {
        writeln!(page, "<li>{}</li>", escape(&sentence))?;
    }
    page.push_str("</ul>\n");
    let loads = distinct(rows.iter().map(RttRow::load));
    let receivers = distinct(rows.iter().map(|row| row.figures.receiver.clone()));
    for receiver in &receivers {
        let is_shown = |row: &&RttRow| {
            row.figures.receiver == *receiver
                || (row.figures.receiver.as_str(), row.wait.as_str()) == BASELINE
        };
        let names = distinct(rows.iter().filter(is_shown).map(RttRow::contender));
        let busy: Vec<String> = loads.iter().filter(|load| *load != "idle").cloned().collect();
        let series = |loads: &[String], value: fn(&crate::schema::RttSample) -> f64| -> Vec<plots::Series> {
            let of = |name: &String, load: &String| {
                let row = rows.iter().find(|row| row.contender() == *name && row.load() == *load);
                row.map(|row| row.samples.iter().map(value).collect::<Vec<f64>>()).unwrap_or_default()
            };
            let one = |(colour, name)| plots::Series {
                printed: false,
                colour,
                samples: loads.iter().map(|load| of(name, load)).collect(),
                values: loads
                    .iter()
                    .map(|load| Summary::from_samples(of(name, load)).map(|summary| summary.median))
                    .collect(),
            };
            names.iter().enumerate().map(one).collect()
        };
        let legend = legend(&names);
        for (what, value) in [
            ("half of the answers (p50)", (|s| s.rtt.p50_ns / 1e3) as fn(&crate::schema::RttSample) -> f64),
            ("99 % of the answers (p99)", |s| s.rtt.p99_ns / 1e3),
        ] {
            figure(
                page,
                &format!("{receiver}: time of {what}"),
                "From when a request was due. Lines join medians; each faint dot is one sample. Lower is better.",
                &legend,
                &plots::lines(&busy, "requests", "µs", &series(&busy, value))?,
            );
        }
        figure(
            page,
            &format!("{receiver}: processors kept busy by the answering thread"),
            "Lower is better.",
            &legend,
            &plots::lines(&loads, "requests", "processors", &series(&loads, |s| s.rtt.server_cores))?,
        );
    }
    table(page, rows)?;
    page.push_str("</section>\n");
    Ok(())
}

fn legend(names: &[String]) -> String {
    let entry = |(colour, name): (usize, &String)| {
        format!("<li><i style=\"background:var(--s{})\"></i>{}</li>", colour % plots::COLOURS, escape(name))
    };
    format!("<ul class=legend>{}</ul>", names.iter().enumerate().map(entry).collect::<String>())
}

fn table(page: &mut String, rows: &[RttRow]) -> Result<()> {
    page.push_str(
        "<h3>All figures</h3><div class=wide><table><thead><tr><th>contender<th>requests<th>answers/s<th>loss\
         <th>p50 µs<th>p90<th>p99<th>quartiles<th>p99.9<th>max<th>behind p99<th>server cores<th>machine cores</tr></thead><tbody>\n",
    );
    for row in rows {
        let micros =
            |nanos: f64| if row.mode == "idle" { "–".into() } else { format!("{:.1}", nanos / 1e3) };
        let spread = Summary::from_samples(row.samples.iter().map(|sample| sample.rtt.p99_ns / 1e3));
        let quartiles = spread.filter(|_| row.mode != "idle");
        writeln!(
            page,
            "<tr{}><td>{}<td>{}<td>{}<td>{:.3} %<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.3}<td>{:.3}</tr>",
            if row.figures.receiver.starts_with("lane/") { " class=ours" } else { "" },
            escape(&row.contender()),
            escape(&row.load()),
            format_number(row.figures.delivered_pps),
            row.figures.loss * 100.0,
            micros(row.rtt.p50_ns),
            micros(row.rtt.p90_ns),
            micros(row.rtt.p99_ns),
            quartiles
                .map_or_else(|| "–".into(), |s| format!("{:.1}–{:.1}", s.lower_quartile, s.upper_quartile)),
            micros(row.rtt.p999_ns),
            micros(row.rtt.max_ns),
            micros(row.rtt.behind_p99_ns),
            row.rtt.server_cores,
            row.rtt.machine_cores,
        )?;
    }
    page.push_str("</tbody></table></div>\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{BENCH_RTT, RttMetrics, RttSample, Sample};

    fn row(receiver: &str, wait: &str, mode: &str, p99_ns: f64, server_cores: f64) -> RttRow {
        let sample = Sample {
            round: 0,
            offered_pps: 1e4,
            delivered_pps: 1e4,
            loss: 0.0,
            rx_cpu_ns: 1e3,
            total_cpu_ns: 2e3,
            sent: 100,
            delivered: 100,
            kernel_dropped: 0,
            taken: None,
        };
        let seen = |round: usize| RttSample {
            sample,
            rtt: RttMetrics {
                p50_ns: p99_ns / 2.0 + round as f64,
                p90_ns: p99_ns,
                p99_ns: p99_ns + round as f64,
                p999_ns: p99_ns,
                max_ns: p99_ns + 10.0 * round as f64,
                behind_p99_ns: 100.0,
                server_cores,
                machine_cores: 2.0,
            },
        };
        RttRow {
            wait: wait.into(),
            placement: "apart".into(),
            mode: mode.into(),
            rate: (mode == "open").then_some(20e3),
            ..RttRow::from_samples(receiver, 64, (0..5).map(seen).collect())
        }
    }

    fn rows() -> Vec<RttRow> {
        vec![
            row("socket/recvfrom", "sleep", "ping-pong", 20e3, 0.4),
            row("lane/mmsg", "spin:1000", "ping-pong", 10e3, 1.0),
            row("lane/mmsg", "spin:1000", "open", 10e3, 1.0),
            row("lane/mmsg", "adaptive", "open", 12e3, 0.25),
            row("lane/mmsg", "adaptive", "idle", 0.0, 0.0005),
        ]
    }

    #[test]
    fn the_words_follow_the_figures() {
        let said = conclusions(&rows()).join(" ");
        assert!(
            said.contains("lane/mmsg+spin:1000 answers in 5.0 µs (p50) and 10.0 µs (p99), 0.50 and 0.50 of"),
            "{said}"
        );
        assert!(
            said.contains("20k/s: lane/mmsg+adaptive keeps 0.25 processors busy where spin:1000 keeps 1.00"),
            "{said}"
        );
        assert!(said.contains("for 1.20 of its p99"), "{said}");
        assert!(said.contains("lane/mmsg+adaptive costs 0.050 % of a processor while idle"), "{said}");
        let same = [
            row("socket/recvfrom", "sleep", "ping-pong", 9e3, 1.0),
            row("lane/mmsg", "sleep", "ping-pong", 9e3, 1.0),
        ];
        assert!(conclusions(&same).join(" ").contains("1.00 (may be chance"));
    }

    #[test]
    fn the_page_has_plots_and_every_row() {
        let document = Document::new(BENCH_RTT, BenchSettings::default(), rows());
        let page = html(&document).unwrap();
        assert!(page.contains("<svg") && page.matches("<tr").count() == 1 + 5);
        let text = serde_json::to_string(&document).unwrap();
        // The common fields of rows and samples are flattened in the document.
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        for of in [&value["rows"][0], &value["rows"][0]["samples"][4]] {
            assert!(of["rtt"].is_null() && of["p50_ns"].is_f64() && of["machine_cores"] == 2.0, "{of}");
        }
        assert_eq!(serde_json::from_str::<Document<BenchSettings, RttRow>>(&text).unwrap(), document);
        assert!(html(&Document::new(BENCH_RTT, BenchSettings::default(), Vec::new())).is_ok());
    }
}
