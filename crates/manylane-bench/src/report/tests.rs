//! Pages and tables of made-up rows: complete, with the right comparisons.

use super::*;
use crate::schema::{
    BENCH_BATCH, BENCH_CHURN, BENCH_ECHO, BENCH_FLAP, BENCH_FLOOD, BENCH_RTT, BENCH_RX, BatchRow,
    BatchSample, BenchRow, ChurnRow, FlapRow, FlapSample, FloodClients, FloodMemory, FloodPauses, FloodRow,
    FloodSample, Metrics, RttMetrics, RttRow, RttSample, SENDER_CPU_PROGRAM, Sample,
};

fn sample(round: usize, rx_cpu_ns: f64) -> Sample {
    Sample {
        queued_at_end: 0,
        round,
        offered_pps: 1e5,
        delivered_pps: 1e5,
        loss: 0.0,
        rx_cpu_ns,
        total_cpu_ns: 2.0 * rx_cpu_ns,
        sent: 1000,
        delivered: 1000,
        kernel_dropped: 3,
        received: None,
    }
}

/// Renders `rows` as a page with that many plots and table lines. It must be complete, and load
/// nothing.
fn page<R: Figures + Clone>(schema: &str, rows: &[R], plots: usize, lines: usize) -> String {
    let settings = BenchSettings { command: "manylane bench '<&>'".into(), ..Default::default() };
    let page = html(&Document::new(schema, settings.clone(), rows.to_vec())).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    assert_eq!((page.matches("<svg").count(), page.matches("<tr").count()), (plots, lines), "{schema}");
    // The name of the SVG namespace is not a URL to load.
    let bare = page.replace("http://www.w3.org/2000/svg", "");
    for loaded in ["http://", "https://", "<script", "<link", "src=", "@import", "url("] {
        assert!(!bare.contains(loaded), "{loaded}");
    }
    assert!(page.contains("&lt;&amp;&gt;") && !page.contains("<&>"));
    // Without rows, it still renders.
    assert!(html(&Document::new(schema, settings, Vec::<R>::new())).is_ok());
    for row in rows {
        assert_eq!(row.cells(rows).len(), R::COLUMNS.len(), "{schema}");
    }
    page
}

#[test]
fn costs_are_compared_with_the_cheapest_equal_baseline() {
    let row = |receiver: &str, threads, cost: f64| {
        let samples = (0..5).map(|round| sample(round, cost + round as f64)).collect();
        let row = BenchRow::from_samples(receiver, threads, threads, 10, samples);
        BenchRow { sustained_pps: Some(5e5), goodput_at_double_pps: Some(4.5e5), ..row }
    };
    let mut rows = Vec::new();
    for (receiver, cost) in [
        ("socket/recvfrom", 900.0),
        ("reuseport/gro", 800.0),
        ("reuseport/recvmmsg", 850.0),
        ("lane/mmsg", 400.0),
    ] {
        rows.extend([1, 8].map(|threads| row(receiver, threads, cost * threads as f64)));
    }
    rows.push(row("lane/xdp", 1, 100.0));
    let html = page(BENCH_RX, &rows, 3, 1 + 9);
    assert!(html.contains("ns per datagram"));
    let ratio = |row: &BenchRow| row.cells(&rows)[7..9].join(" ");
    assert_eq!(ratio(&rows[6]), "0.50 (0.008) reuseport/gro");
    assert_eq!(ratio(&rows[7]), "0.50 (0.008) reuseport/gro");
    assert_eq!((ratio(&rows[0]), ratio(&rows[8])), (" ".into(), " ".into()), "a baseline, and none measured");
    for sample in rows.iter_mut().flat_map(|row| &mut row.samples) {
        sample.received = Some(1000);
    }
    let html = page(BENCH_ECHO, &rows, 3, 1 + 9);
    assert!(html.contains("per answered request") && !html.contains("per datagram"));
}

#[test]
fn batches_have_a_section_for_each_size() {
    let mut rows = Vec::new();
    for (size, messages) in [(64, 1), (64, 16), (8192, 1), (8192, 16)] {
        for (name, rx_cpu_ns) in [("socket/recvmmsg", 700.0), ("lane/<uring>", 650.0)] {
            let seen = |round: usize| BatchSample {
                round,
                rx_cpu_ns: rx_cpu_ns + round as f64,
                sent: 10,
                delivered: 10,
                calls: 1,
            };
            rows.push(BatchRow::from_samples(name, size, messages, (0..5).map(seen).collect()));
        }
    }
    let html = page(BENCH_BATCH, &rows, 2, 2 * (1 + 4));
    assert_eq!(html.matches("<td>702<td>701–703").count(), 4);
    assert!(html.contains("lane/&lt;uring&gt;") && !html.contains("lane/<uring>"));
}

#[test]
fn losses_of_each_event_are_drawn() {
    let row = |event: &str, receiver: &str, lost: [u64; 3]| {
        let seen = |(round, &lost): (usize, &u64)| FlapSample {
            sample: sample(round, 1.0),
            refused: 5,
            lost,
            event_micros: 21_000 + round as u64,
        };
        FlapRow::from_samples(event, receiver, 2, 2, 10, lost.iter().enumerate().map(seen).collect())
    };
    let rows = [
        row("nothing", "lane/<xdp>", [0, 1, 0]),
        row("receiver-link", "lane/<xdp>", [7, 9, 40]),
        row("receiver-link", "lane/mmsg", [0, 0, 0]),
    ];
    let html = page(BENCH_FLAP, &rows, 2, 1 + 3);
    assert!(html.contains("<td>9<td>40<td>3<td>21.0") && !html.contains("<xdp>"));
}

#[test]
fn lost_datagrams_stand_beside_added_and_removed_lanes() {
    let row = |lanes, lost| ChurnRow {
        figures: Metrics::from_samples("lane/mmsg", lanes, lanes, 10, [&sample(0, 1.0)].into_iter()),
        sent: 1000,
        delivered: 1000 - lost,
        lost,
        added: 11,
        removed: 12,
        change_interval_ms: 50,
        samples: vec![sample(0, 1.0)],
    };
    let html = page(BENCH_CHURN, &[row(2, 0), row(4, 3)], 1, 1 + 2);
    assert!(html.contains("<td>1000<td>1000<td>0<td>3<td>11<td>12<td>50"), "{html}");
    assert!(html.contains("<td>1000<td>997<td>3<td>3<td>11"), "{html}");
}

#[test]
fn round_trips_are_compared_with_the_blocking_receiver() {
    let row = |receiver: &str, wait: &str, mode: &str, p99_ns: f64| {
        let seen = |round: usize| RttSample {
            sample: sample(round, 1e3),
            rtt: RttMetrics { p99_ns: p99_ns + round as f64, machine_cores: 2.0, ..RttMetrics::default() },
        };
        RttRow {
            wait: wait.into(),
            cpu_layout: "apart".into(),
            mode: mode.into(),
            rate: (mode == "open").then_some(20e3),
            ..RttRow::from_samples(receiver, 64, (0..5).map(seen).collect())
        }
    };
    let rows = [
        row("socket/recvfrom", "sleep", "ping-pong", 20e3),
        row("lane/mmsg", "spin:1000", "ping-pong", 10e3),
        row("lane/mmsg", "spin:1000", "open", 10e3),
        row("lane/mmsg", "adaptive", "idle", 0.0),
    ];
    page(BENCH_RTT, &rows, 2 * 3, 1 + 4);
    let ratio = |row: &RttRow| row.cells(&rows)[9].clone();
    assert_eq!(rows.each_ref().map(ratio), ["", "0.50 (0.008)", "", ""]);
    let document = Document::new(BENCH_RTT, BenchSettings::default(), rows.to_vec());
    // The common fields of rows and samples are flattened in the document.
    let value = serde_json::to_value(&document).unwrap();
    for of in [&value["rows"][0], &value["rows"][0]["samples"][4]] {
        assert!(of["rtt"].is_null() && of["p50_ns"].is_f64() && of["machine_cores"] == 2.0, "{of}");
    }
}

#[test]
fn each_part_of_a_flood_has_its_figures() {
    let row = |part: &str, variant: &str, change: &dyn Fn(u64, &mut FloodSample)| {
        let samples = (0..5).map(|round| {
            let sample = sample(round, 1.0);
            let mut seen = FloodSample {
                sample,
                limited: 0,
                xsk_dropped: 0,
                clients: None,
                memory: None,
                pauses: Vec::new(),
            };
            change(round as u64, &mut seen);
            seen
        });
        FloodRow::from_samples(part, variant, "lane/xdp", 32, samples.collect())
    };
    let pauses = |thread: &str, longest_ms: f64, longest_apart_ms| FloodPauses {
        thread: thread.into(),
        seconds: 1.0,
        longest_ms,
        longest_unstolen_ms: Some(11.5),
        longest_apart_ms,
        over_1ms: 4,
        share: Some(0.5),
        ..FloodPauses::default()
    };
    let clients = |variant: &str, answered: u64| {
        row("clients", variant, &move |round, seen| {
            let (asked, answered) = (1000, answered + 10 * round);
            seen.clients = Some(FloodClients { asked, answered, p50_ms: 0.2, p99_ms: 3.0 });
        })
    };
    let rows = vec![
        clients("no-<flood>", 960),
        clients("no-limit", 700),
        row("sources", "new-sources", &|round, seen| {
            let rss_kib = vec![50_000 + 3 * round, 50_000];
            seen.memory = Some(FloodMemory { new_sources: 1_000_000, rss_kib, slab_kib: vec![1, 1] });
            seen.pauses = vec![pauses("lane", 12.5, None), pauses("observer", 12.5, None)];
        }),
        row("program", "no-flood", &|_, seen| seen.pauses = vec![pauses("program", 5.0, None)]),
        row("program", "limit", &|_, seen| {
            seen.pauses = vec![pauses("program", 10.0, None), pauses(SENDER_CPU_PROGRAM, 9.0, Some(0.5))];
        }),
    ];
    let html = page(BENCH_FLOOD, &rows, 2 + 2 + 3, 3 + 5);
    assert!(html.contains("no-&lt;flood&gt;") && !html.contains("no-<flood>"));
    let ratio = |row: &FloodRow| row.cells(&rows)[11].clone();
    assert_eq!(rows.iter().map(ratio).collect::<Vec<_>>(), ["", "0.73 (0.008)", "", "", "2.00 (0.008)"]);
    assert_eq!((rows[1].answered, rows[2].grown_kib), (Some(0.72), Some(12)));
    assert_eq!(rows[4].cells(&rows)[12..], ["9.0", "0.5", "–"]);
    // A part that did not run has no section, and no empty plots.
    page(BENCH_FLOOD, &rows[..1], 2, 1 + 1);
}

/// A colour that is not in the head has no effect: legend and lines would not match.
#[test]
fn plot_colours_are_defined_for_light_and_dark() {
    let head = include_str!("head.html");
    for colour in 0..plots::COLOURS {
        assert_eq!(head.matches(&format!("--s{colour}:#")).count(), 2, "{colour}");
    }
    assert!(figure::colour("lane/xdp").is_some_and(|colour| colour < plots::COLOURS));
}
