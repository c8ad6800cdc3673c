//! Pages about runs of `bench churn` and `bench flap`: losses when lanes are added and removed,
//! and when sockets, programs or links change.

use std::fmt::Write as _;

use anyhow::Result;

use super::common::{PlotLabels, bars, page, samples, table};
use super::format_number;
use crate::schema::{BenchSettings, ChurnRow, Document, FlapRow};
use crate::stats::distinct;

/// The page of `bench churn`.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn churn(document: &Document<BenchSettings, ChurnRow>) -> Result<String> {
    page(document, &churn_conclusions(&document.rows), |page| {
        for size in distinct(document.rows.iter().map(|row| row.size)) {
            let rows: Vec<&ChurnRow> = document.rows.iter().filter(|row| row.size == size).collect();
            writeln!(page, "<section><h2>Datagrams of {size} bytes</h2>")?;
            let places: Vec<String> = rows.iter().map(|row| row.lanes.to_string()).collect();
            let words = PlotLabels {
                title: "Datagrams sent and not delivered",
                caption: "Dark line: what the kernel dropped at a full queue. None is as it should be.",
                x: "lanes at the start",
                y: "datagrams",
            };
            let dropped = |row: &ChurnRow| row.samples.iter().map(|seen| seen.kernel_dropped).sum::<u64>();
            bars(page, words, &places, &["lost"], |_, place| {
                Some((rows[place].lost as f64, Some(dropped(rows[place]) as f64)))
            })?;
            let words = PlotLabels {
                title: "Changes while traffic ran",
                caption: "Each is a lane more or a lane less.",
                x: "lanes at the start",
                y: "lanes",
            };
            bars(page, words, &places, &["added", "removed"], |name, place| {
                Some(([rows[place].added, rows[place].removed][name] as f64, None))
            })?;
            let header = [
                "receiver",
                "lanes",
                "offered/s",
                "sent",
                "delivered",
                "lost",
                "added",
                "removed",
                "every ms",
            ];
            let line = |row: &&ChurnRow| -> Vec<String> {
                let counts = [row.sent, row.delivered, row.lost, row.added, row.removed, row.every_ms];
                let first = [row.receiver.clone(), row.lanes.to_string(), format_number(row.offered_pps)];
                first.into_iter().chain(counts.map(|count| count.to_string())).collect()
            };
            table(page, &header, &rows.iter().map(line).collect::<Vec<_>>());
            page.push_str("</section>\n");
        }
        Ok(())
    })
}

fn churn_conclusions(rows: &[ChurnRow]) -> Vec<String> {
    let said = rows.iter().map(|row| {
        let lost = if row.lost == 0 { "none is lost".into() } else { format!("{} are lost", row.lost) };
        format!(
            "{} lanes, {} more and {} less on the way, at {} datagrams per second of {} bytes: of {} sent {lost}.",
            row.lanes,
            row.added,
            row.removed,
            format_number(row.offered_pps),
            row.size,
            row.sent
        )
    });
    said.collect()
}

/// The page of `bench flap`.
///
/// # Errors
/// When a plot cannot be drawn.
pub fn flap(document: &Document<BenchSettings, FlapRow>) -> Result<String> {
    page(document, &flap_conclusions(&document.rows), |page| {
        for (threads, size) in
            distinct(document.rows.iter().map(|row| (row.figures.threads, row.figures.size)))
        {
            let of = |row: &&FlapRow| (row.figures.threads, row.figures.size) == (threads, size);
            let rows: Vec<&FlapRow> = document.rows.iter().filter(of).collect();
            let events = distinct(rows.iter().map(|row| row.event.clone()));
            let names = distinct(rows.iter().map(|row| row.figures.receiver.as_str()));
            let at = |name: usize, place: usize| {
                let own = |row: &&&FlapRow| row.figures.receiver == names[name] && row.event == events[place];
                rows.iter().find(own).copied()
            };
            writeln!(page, "<section><h2>{threads} threads, datagrams of {size} bytes</h2>")?;
            let words = PlotLabels {
                title: "Datagrams that entered the link and were not delivered",
                caption: "Medians; dark line: the worst sample. Lower is better.",
                x: "what happens meanwhile",
                y: "datagrams",
            };
            bars(page, words, &events, &names, |name, place| {
                at(name, place).map(|row| (row.lost, Some(row.lost_most as f64)))
            })?;
            let words = PlotLabels {
                title: "How long the event took",
                caption: "A link that goes down is down for 20 ms of it.",
                x: "what happens meanwhile",
                y: "ms",
            };
            samples(page, words, &events, &names, |name, place| {
                let row = at(name, place);
                row.map_or_else(Vec::new, |row| {
                    row.samples.iter().map(|seen| seen.event_micros as f64 / 1e3).collect()
                })
            })?;
            let header = [
                "event",
                "receiver",
                "offered/s",
                "sent",
                "refused",
                "delivered",
                "lost",
                "at most",
                "event ms",
            ];
            let line = |row: &&FlapRow| -> Vec<String> {
                let counts = [row.sent, row.refused, row.delivered, row.lost, row.lost_most as f64];
                let first =
                    [row.event.clone(), row.figures.receiver.clone(), format_number(row.figures.offered_pps)];
                let counts = counts.map(|count| format!("{count:.0}"));
                first.into_iter().chain(counts).chain([format!("{:.1}", row.event_micros / 1e3)]).collect()
            };
            table(page, &header, &rows.iter().map(line).collect::<Vec<_>>());
            page.push_str("</section>\n");
        }
        Ok(())
    })
}

/// Losses of each event, compared with those of rounds without an event.
fn flap_conclusions(rows: &[FlapRow]) -> Vec<String> {
    let said = rows.iter().filter(|row| row.event != "nothing").map(|row| {
        let like = |other: &&FlapRow| {
            other.event == "nothing"
                && (&other.figures.receiver, other.figures.threads, other.figures.size)
                    == (&row.figures.receiver, row.figures.threads, row.figures.size)
        };
        let lost = match (row.lost, row.lost_most) {
            (_, 0) => "loses nothing".into(),
            (middle, most) => format!("loses {middle:.0} datagrams in the middle, {most} at most"),
        };
        let idle = rows.iter().find(like).map_or_else(String::new, |idle| {
            format!(" ({:.0} and {} while nothing happens)", idle.lost, idle.lost_most)
        });
        format!("{}, {} threads: {} {lost}{idle}.", row.event, row.figures.threads, row.figures.receiver)
    });
    said.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{BENCH_CHURN, BENCH_FLAP, FlapSample, Sample};

    fn sample(round: usize) -> Sample {
        Sample {
            round,
            offered_pps: 1e5,
            delivered_pps: 1e5,
            loss: 0.0,
            rx_cpu_ns: 1.0,
            total_cpu_ns: 2.0,
            sent: 1000,
            delivered: 1000,
            kernel_dropped: 3,
            taken: None,
        }
    }

    fn flap_row(event: &str, receiver: &str, lost: [u64; 3]) -> FlapRow {
        let seen = |(round, &lost): (usize, &u64)| FlapSample {
            sample: sample(round),
            refused: 5,
            lost,
            event_micros: 21_000 + round as u64,
        };
        FlapRow::from_samples(event, receiver, 2, 2, 10, lost.iter().enumerate().map(seen).collect())
    }

    fn assert_complete(page: &str, plots: usize, lines: usize) {
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert_eq!((page.matches("<svg").count(), page.matches("<tr").count()), (plots, lines));
        let page = page.replace("http://www.w3.org/2000/svg", "");
        for loaded in ["http://", "https://", "<script", "<link", "src=", "@import", "url("] {
            assert!(!page.contains(loaded), "{loaded}");
        }
    }

    #[test]
    fn each_event_is_drawn_and_held_against_rounds_without_one() {
        let rows = vec![
            flap_row("nothing", "lane/<xdp>", [0, 1, 0]),
            flap_row("receiver-link", "lane/<xdp>", [7, 9, 40]),
            flap_row("receiver-link", "lane/mmsg", [0, 0, 0]),
        ];
        let settings = BenchSettings { command: "manylane bench flap '<&>'".into(), ..Default::default() };
        let page = flap(&Document::new(BENCH_FLAP, settings, rows)).unwrap();
        assert_complete(&page, 2, 1 + 3);
        assert!(page.contains(
            "receiver-link, 2 threads: lane/&lt;xdp&gt; loses 9 datagrams in the middle, 40 at most (0 and 1 while nothing happens)."
        ));
        assert!(
            page.contains("lane/mmsg loses nothing.") && page.contains("<td>21.0") && !page.contains("<xdp>")
        );
    }

    #[test]
    fn lanes_that_come_and_go_are_drawn_with_what_was_lost() {
        let row = |lanes, lost| ChurnRow {
            receiver: "lane/mmsg".into(),
            threads: lanes,
            lanes,
            size: 10,
            offered_pps: 1e5,
            delivered_pps: 1e5,
            loss: 0.0,
            rx_cpu_ns: None,
            total_cpu_ns: 2.0,
            sent: 1000,
            delivered: 1000 - lost,
            lost,
            added: 11,
            removed: 12,
            every_ms: 50,
            samples: vec![sample(0)],
        };
        let rows = vec![row(2, 0), row(4, 3)];
        let page = churn(&Document::new(BENCH_CHURN, BenchSettings::default(), rows)).unwrap();
        assert_complete(&page, 2, 1 + 2);
        assert!(page.contains("2 lanes, 11 more and 12 less") && page.contains("of 1000 sent none is lost"));
        assert!(page.contains("of 1000 sent 3 are lost"));
        assert!(churn(&Document::new(BENCH_CHURN, BenchSettings::default(), Vec::new())).is_ok());
    }
}
