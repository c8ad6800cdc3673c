//! A page about one run: the settings, the conclusion, plots, and all figures, in one file that
//! loads nothing else.

pub mod batch;
mod common;
mod conclusion;
pub mod events;
pub mod flood;
pub mod plots;
pub mod rtt;

use std::fmt::Write as _;

use anyhow::Result;

use crate::schema::{BenchRow, BenchSettings, Document};
use crate::stats::Summary;
use crate::stats::distinct;
use conclusion::Labels;

use manylane_measure::format_number;

/// Sentences computed from the figures of a run, in the order of payload sizes.
pub fn conclusions(document: &Document<BenchSettings, BenchRow>) -> Vec<String> {
    let mut said = Vec::new();
    for size in sizes(document) {
        let rows: Vec<&BenchRow> = document.rows.iter().filter(|row| row.figures.size == size).collect();
        said.extend(conclusion::conclude(&rows, Labels::for_schema(&document.schema)));
    }
    said
}

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn html(document: &Document<BenchSettings, BenchRow>) -> Result<String> {
    let name = document.schema.trim_start_matches("manylane.").trim_end_matches(".v1").replace('.', " ");
    let mut page = String::with_capacity(256 << 10);
    let title = format!("manylane {name}");
    write!(page, include_str!("head.html"), title = escape(&title))?;
    write!(page, "<h1>{}</h1>\n<p class=lead>{}</p>\n", escape(&title), escape(&subtitle(document)))?;
    for size in sizes(document) {
        let rows: Vec<&BenchRow> = document.rows.iter().filter(|row| row.figures.size == size).collect();
        section(&mut page, size, &rows, Labels::for_schema(&document.schema))?;
    }
    about(&mut page, document)?;
    page += "</main></body></html>\n";
    Ok(page)
}

fn sizes(document: &Document<BenchSettings, BenchRow>) -> Vec<usize> {
    let mut sizes: Vec<usize> = document.rows.iter().map(|row| row.figures.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn subtitle<R>(document: &Document<BenchSettings, R>) -> String {
    let (machine, settings) = (&document.machine, &document.settings);
    format!(
        "{} processors ({}), Linux {}. Traffic over {} from {}, {} flows, {} rounds of {} s, receivers taking turns.",
        machine.cpus,
        machine.model,
        machine.kernel,
        settings.device,
        settings.sender,
        settings.flows,
        settings.rounds,
        settings.sample_seconds
    )
}

fn section(page: &mut String, size: usize, rows: &[&BenchRow], words: Labels) -> Result<()> {
    let Labels { sent, unit, verb: does } = words;
    writeln!(page, "<section><h2>{sent} of {size} bytes</h2>")?;
    page.push_str("<h3>What this run says</h3>\n<ul class=says>\n");
    for sentence in conclusion::conclude(rows, words) {
        writeln!(page, "<li>{}</li>", escape(&sentence))?;
    }
    writeln!(page, "<li class=quality>{}</li></ul>", escape(&conclusion::quality(rows)))?;

    let names = distinct(rows.iter().map(|row| row.figures.receiver.clone()));
    let threads = {
        let mut threads = distinct(rows.iter().map(|row| row.figures.threads));
        threads.sort_unstable();
        threads
    };
    let labels: Vec<String> = threads.iter().map(ToString::to_string).collect();
    let series = |value: &dyn Fn(&BenchRow) -> Option<f64>,
                  samples: &dyn Fn(&BenchRow) -> Vec<f64>|
     -> Vec<plots::Series> {
        let at = |name: &str, count: usize| {
            rows.iter().copied().find(|row| row.figures.receiver == name && row.figures.threads == count)
        };
        names
            .iter()
            .map(|name| plots::Series {
                printed: false,
                colour: colour(name),
                values: threads.iter().map(|count| at(name, *count).and_then(value)).collect(),
                samples: threads
                    .iter()
                    .map(|count| at(name, *count).map(samples).unwrap_or_default())
                    .collect(),
            })
            .collect()
    };
    let each = |value: fn(&crate::schema::Sample) -> f64| {
        move |row: &BenchRow| row.samples.iter().map(value).collect::<Vec<f64>>()
    };
    let legend = legend(&names);
    figure(
        page,
        &format!("Receiver CPU per {unit}"),
        "Lines join medians; each faint dot is one sample. Lower is better.",
        &legend,
        &plots::lines(
            &labels,
            "threads",
            &format!("ns per {unit}"),
            &series(&|row| Some(row.figures.rx_cpu_ns), &each(|s| s.rx_cpu_ns)),
        )?,
    );
    figure(
        page,
        &format!("CPU of the whole machine per {unit}"),
        "Sender, softirqs and receivers together. Lower is better.",
        &legend,
        &plots::lines(
            &labels,
            "threads",
            &format!("ns per {unit}"),
            &series(&|row| Some(row.figures.total_cpu_ns), &each(|s| s.total_cpu_ns)),
        )?,
    );
    let none = |_: &BenchRow| Vec::new();
    let best = series(&|row| row.no_loss_pps, &none);
    if best.iter().any(|bar| bar.values.iter().any(Option::is_some)) {
        let double = series(&|row| row.goodput_at_double_pps, &none);
        let (labels, best, double) = drop_unmeasured(&labels, best, double);
        figure(
            page,
            "Highest rate without loss, and what is left at twice that rate",
            &format!(
                "Bars: {unit}s per second with at most 0.1 % lost. Dark line: what it {does} when twice that arrives. Higher is better."
            ),
            &legend,
            &plots::bars(&labels, "threads", &format!("{unit}s per second"), &best, &double)?,
        );
    }
    table(page, rows)?;
    page.push_str("</section>\n");
    Ok(())
}

/// Leaves out places without a bar, because a quick run searches rates for one number of threads
/// only.
fn drop_unmeasured(
    labels: &[String],
    mut bars: Vec<plots::Series>,
    mut lines: Vec<plots::Series>,
) -> (Vec<String>, Vec<plots::Series>, Vec<plots::Series>) {
    let stands = |place: usize| bars.iter().any(|bar| bar.values[place].is_some());
    let places: Vec<usize> = (0..labels.len()).filter(|&place| stands(place)).collect();
    for series in bars.iter_mut().chain(&mut lines) {
        series.values = places.iter().map(|&place| series.values[place]).collect();
    }
    (places.iter().map(|&place| labels[place].clone()).collect(), bars, lines)
}

/// A figure: a title, a legend, a plot, a caption.
pub fn figure(page: &mut String, title: &str, caption: &str, legend: &str, svg: &str) {
    let _ = writeln!(
        page,
        "<figure><h3>{}</h3>{legend}<div class=plot>{svg}</div><figcaption>{}</figcaption></figure>",
        escape(title),
        escape(caption)
    );
}

fn legend(names: &[String]) -> String {
    let entries: String = names
        .iter()
        .map(|name| format!("<li><i style=\"background:var(--s{})\"></i>{}</li>", colour(name), escape(name)))
        .collect();
    format!("<ul class=legend>{entries}</ul>")
}

/// The colour of a receiver: the first one is that of lanes, everywhere.
fn colour(name: &str) -> usize {
    const NAMES: [&str; 10] = [
        "lane/mmsg",
        "socket/recvfrom",
        "socket/recvmmsg",
        "reuseport/recvmmsg",
        "reuseport/gro",
        "xsk/raw",
        "lane/xdp",
        "uring/plain",
        "lane/uring",
        "xsk/checked",
    ];
    NAMES.iter().position(|known| *known == name).unwrap_or(NAMES.len())
}

fn table(page: &mut String, rows: &[&BenchRow]) -> Result<()> {
    page.push_str(
        "<h3>All figures</h3><div class=wide><table><thead><tr><th>receiver<th>threads<th>lanes<th>offered/s\
         <th>delivered/s<th>loss<th>receiver ns<th>quartiles<th>machine ns<th>no-loss/s<th>at twice that/s</tr></thead><tbody>\n",
    );
    let optional = |value: Option<f64>| value.map_or_else(|| "–".into(), format_number);
    for row in rows {
        let spread = Summary::from_samples(row.samples.iter().map(|sample| sample.rx_cpu_ns));
        let quartiles =
            spread.map_or_else(String::new, |s| format!("{:.0}–{:.0}", s.lower_quartile, s.upper_quartile));
        let limited = if row.sender_limited == Some(true) { "≥ " } else { "" };
        writeln!(
            page,
            "<tr{}><td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.3} %<td>{:.0}<td>{quartiles}<td>{:.0}<td>{limited}{}<td>{}</tr>",
            if row.figures.receiver.starts_with("lane/") { " class=ours" } else { "" },
            escape(&row.figures.receiver),
            row.figures.threads,
            row.figures.lanes,
            format_number(row.figures.offered_pps),
            format_number(row.figures.delivered_pps),
            row.figures.loss * 100.0,
            row.figures.rx_cpu_ns,
            row.figures.total_cpu_ns,
            optional(row.no_loss_pps),
            optional(row.goodput_at_double_pps),
        )?;
    }
    page.push_str("</tbody></table></div>\n");
    Ok(())
}

fn about<R>(page: &mut String, document: &Document<BenchSettings, R>) -> Result<()> {
    let (machine, settings) = (&document.machine, &document.settings);
    page.push_str("<section><h2>How it was measured</h2>\n<dl>\n");
    let cpus = |list: &[usize]| list.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut entry = |name: &str, value: &str| {
        let _ = writeln!(page, "<dt>{name}<dd>{}", escape(if value.is_empty() { "–" } else { value }));
    };
    entry("Command", &settings.command);
    entry(
        "Machine",
        &format!(
            "{} × {}, {} GiB{}",
            machine.cpus,
            machine.model,
            machine.memory_bytes >> 30,
            if machine.virtual_machine { ", a virtual machine" } else { "" }
        ),
    );
    entry("Kernel", &machine.kernel);
    entry("Idle processors", &machine.idle);
    entry("Mitigations", &machine.mitigations.join("; "));
    entry("Traffic", &format!("{} over {} ({})", settings.sender, settings.device, settings.setup));
    entry("Processor of the sender", &cpus(&settings.sender_cpus));
    entry("Processors of the receivers", &cpus(&settings.receiver_cpus));
    entry("Batch, receive buffer", &format!("{} datagrams, {} bytes", settings.batch, settings.recv_buffer));
    let pauses = |all: &[u64]| -> String {
        let each = settings.threads.iter().zip(all);
        let pauses: Vec<_> =
            each.map(|(threads, micros)| format!("{micros} µs with {threads} threads")).collect();
        pauses.join(", ")
    };
    let after = "after a batch that was not full";
    entry(&format!("Pause of lane/mmsg and reuseport/* {after}"), &pauses(&settings.rx_usecs));
    if !settings.xdp_rx_usecs.is_empty() {
        entry(&format!("Pause of lane/xdp and xsk/* {after}"), &pauses(&settings.xdp_rx_usecs));
    }
    entry("Steering of lanes", &settings.steering);
    if settings.work_nanos > 0 {
        entry("Work of the application for each datagram", &format!("{} ns", settings.work_nanos));
    }
    for note in &settings.notes {
        entry("Note", note);
    }
    page.push_str("</dl>\n<p>The raw samples are in the JSON file beside this page.</p></section>\n");
    Ok(())
}

/// The beginning of a page.
#[must_use]
pub fn head(title: &str) -> String {
    format!(include_str!("head.html"), title = escape(title))
}

/// Text as HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{BENCH_RX, Sample};

    fn document() -> Document<BenchSettings, BenchRow> {
        let mut rows = Vec::new();
        for (receiver, cost) in [("socket/recvfrom", 900.0), ("reuseport/gro", 400.0), ("lane/mmsg", 390.0)] {
            for threads in [1, 8] {
                let samples = (0..5).map(|round| Sample {
                    round,
                    offered_pps: 200_000.0,
                    delivered_pps: 199_990.0,
                    loss: 0.0,
                    rx_cpu_ns: cost + round as f64,
                    total_cpu_ns: 2.0 * cost,
                    sent: 200_000,
                    delivered: 200_000,
                    kernel_dropped: 0,
                    taken: None,
                });
                let mut row = BenchRow::from_samples(receiver, threads, threads, 10, samples.collect());
                row.no_loss_pps = Some(500_000.0);
                row.offered_at_double_pps = Some(1e6);
                row.goodput_at_double_pps = Some(450_000.0);
                rows.push(row);
            }
        }
        let settings = BenchSettings { command: "manylane bench rx --x '<&>'".into(), ..Default::default() };
        Document::new(BENCH_RX, settings, rows)
    }

    #[test]
    fn the_page_is_whole_and_loads_nothing() {
        let page = html(&document()).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert_eq!(page.matches("<svg").count(), 3);
        for loaded in ["http://", "https://", "<script", "<link", "src=", "@import", "url("] {
            // The name of the SVG namespace is not an address to load.
            let page = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(loaded), "{loaded}");
        }
        assert!(page.contains("&lt;&amp;&gt;") && !page.contains("<&>"));
    }

    #[test]
    fn the_page_repeats_the_computed_conclusion() {
        let document = document();
        let said = conclusions(&document);
        assert!(!said.is_empty());
        let page = html(&document).unwrap();
        for sentence in said {
            assert!(page.contains(&escape(&sentence)), "{sentence}");
        }
    }

    /// A colour that is not in the head has no effect: legend and lines would not match.
    #[test]
    fn each_colour_is_one_of_the_page_light_and_dark() {
        let head = include_str!("head.html");
        for colour in 0..plots::COLOURS {
            assert_eq!(head.matches(&format!("--s{colour}:#")).count(), 2, "{colour}");
        }
        assert!(colour("one that nobody knows") < plots::COLOURS);
    }

    #[test]
    fn a_run_without_rows_is_a_page_too() {
        let empty = Document::new(BENCH_RX, BenchSettings::default(), Vec::new());
        assert!(html(&empty).is_ok());
    }
}
