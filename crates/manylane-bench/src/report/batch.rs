//! A page about a run of `bench batch` or `bench replies`: cost by size and messages per call.

use std::fmt::Write as _;

use anyhow::Result;

use super::{colour, escape, figure, legend, plots};
use crate::schema::{BENCH_REPLIES, BatchRow, BenchSettings, Document};
use crate::stats::{Summary, distinct};

/// The page.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn html(document: &Document<BenchSettings, BatchRow>) -> Result<String> {
    let mut page = String::with_capacity(128 << 10);
    let (what, verb) = match document.schema.as_str() {
        BENCH_REPLIES => ("replies", "sends"),
        _ => ("batch", "may take"),
    };
    let title = format!("manylane bench {what}");
    write!(page, include_str!("head.html"), title = escape(&title))?;
    let (machine, settings) = (&document.machine, &document.settings);
    let lead = format!(
        "{} processors ({}), Linux {}, over {}; {} rounds, taking turns.",
        machine.cpus, machine.model, machine.kernel, settings.device, settings.rounds
    );
    write!(page, "<h1>{}</h1>\n<p class=lead>{}</p>\n", escape(&title), escape(&lead))?;
    for size in distinct(document.rows.iter().map(|row| row.size)) {
        let rows: Vec<&BatchRow> = document.rows.iter().filter(|row| row.size == size).collect();
        section(&mut page, size, &rows, verb)?;
    }
    page.push_str("<section><h2>How it was measured</h2>\n<dl>\n");
    let command = settings.command.as_str();
    for (name, value) in [("Command", command), ("Mitigations", &machine.mitigations.join("; "))] {
        writeln!(page, "<dt>{name}<dd>{}", escape(value))?;
    }
    for note in &settings.notes {
        writeln!(page, "<dt>Note<dd>{}", escape(note))?;
    }
    page.push_str("</dl>\n<p>The raw samples are in the JSON file beside this page.</p></section>\n");
    page += "</main></body></html>\n";
    Ok(page)
}

fn section(page: &mut String, size: usize, rows: &[&BatchRow], verb: &str) -> Result<()> {
    writeln!(page, "<section><h2>Datagrams of {size} bytes</h2>")?;
    let names = distinct(rows.iter().map(|row| row.receiver.clone()));
    let counts = distinct(rows.iter().map(|row| row.messages));
    let labels: Vec<String> = counts.iter().map(ToString::to_string).collect();
    let at = |name: &str, count: usize| rows.iter().find(|row| row.receiver == name && row.messages == count);
    let series: Vec<plots::Series> = names
        .iter()
        .map(|name| plots::Series {
            printed: false,
            colour: colour(name),
            values: counts.iter().map(|count| at(name, *count).map(|row| row.rx_cpu_ns)).collect(),
            samples: counts
                .iter()
                .map(|count| {
                    at(name, *count).map_or_else(Vec::new, |row| {
                        row.samples.iter().map(|sample| sample.rx_cpu_ns).collect()
                    })
                })
                .collect(),
        })
        .collect();
    let axis = format!("messages that a call {verb}");
    let plot = plots::lines(&labels, &axis, "ns per datagram", &series)?;
    let caption = "Lines join medians; each faint dot is one sample. Lower is better.";
    figure(page, "CPU per datagram", caption, &legend(&names), &plot);
    page.push_str("<div class=wide><table><thead><tr><th>");
    counts.iter().for_each(|count| _ = write!(page, "<th>{count} a call"));
    page.push_str("</tr></thead><tbody>\n");
    for name in &names {
        let ours = if name.starts_with("lane/") { " class=ours" } else { "" };
        write!(page, "<tr{ours}><td>{}", escape(name))?;
        for count in &counts {
            let row = at(name, *count);
            let spread =
                row.and_then(|row| Summary::from_samples(row.samples.iter().map(|sample| sample.rx_cpu_ns)));
            let text = spread.map_or_else(
                || "–".into(),
                |s| format!("{:.0} ({:.0}–{:.0})", s.median, s.lower_quartile, s.upper_quartile),
            );
            write!(page, "<td>{text}")?;
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</tbody></table></div><p>Nanoseconds of CPU per datagram: medians, and the quartiles.</p></section>\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{BENCH_BATCH, BatchSample};

    #[test]
    fn the_page_has_every_row_and_loads_nothing() {
        let mut rows = Vec::new();
        for size in [64, 8192] {
            for messages in [1, 16] {
                for (name, cost) in [("socket/recvmmsg", 700.0), ("lane/<uring>", 650.0)] {
                    let samples = (0..5).map(|round| BatchSample {
                        round,
                        rx_cpu_ns: cost + round as f64,
                        sent: 10,
                        delivered: 10,
                        calls: 1,
                    });
                    rows.push(BatchRow::from_samples(name, size, messages, samples.collect()));
                }
            }
        }
        let page = html(&Document::new(BENCH_BATCH, BenchSettings::default(), rows)).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert_eq!((page.matches("<svg").count(), page.matches("702 (701–703)").count()), (2, 4));
        assert!(page.contains("lane/&lt;uring&gt;") && !page.contains("<script"));
    }
}
