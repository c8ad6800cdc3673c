//! `manylane bench`: its checks, documents and reports.

use std::fs;

use manylane_testbed::skip;
use serde_json::Value;

use crate::program::{self, folder, manylane, run, stderr, stdout};

/// The document of a benchmark that succeeds. Again, up to ten times, as long as it is incomplete:
/// a benchmark waits for fractions of a second, and a receiver may have no CPU for so long.
fn document(words: &[&str], is_complete: impl Fn(&Value) -> bool) -> Value {
    let mut documents = (0..10).map(|_| {
        let output = run(words);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        program::document(&stdout(&output))
    });
    let last = documents.next().unwrap();
    if is_complete(&last) { last } else { documents.find(is_complete).unwrap_or(last) }
}

fn samples(document: &Value) -> impl Iterator<Item = &Value> {
    document["rows"].as_array().unwrap().iter().flat_map(|row| row["samples"].as_array().unwrap())
}

/// Options are checked even before the report's folder is made, which is just before the testbed.
#[test]
fn benchmarks_check_their_options_before_they_make_a_testbed() {
    for (words, hint) in [
        (&["rx", "--testbed", "--batch", "16,64"][..], "bench replies"),
        (&["echo", "--testbed", "--batch", "16,64"], "bench replies"),
        (&["gso", "--batch", "16,64"], "bench replies"),
        (&["churn", "--testbed", "--batch", "16,64"], "bench replies"),
        (&["rtt", "--testbed", "--batch", "16,64"], "bench replies"),
        (&["rtt", "--testbed", "--size", "7"], "8 bytes"),
        (&["flap", "--batch", "16,64"], "bench replies"),
        (&["flood", "--batch", "16,64"], "bench replies"),
        (&["flood", "--size", "64"], "32 bytes"),
        (&["proxy", "--batch", "16,64"], "bench replies"),
        (&["proxy", "--size", "64"], "128 bytes"),
        (&["flap", "--receiver-cpus", "4095"], "CPU 4095"),
    ] {
        let out = folder("bench-unchecked");
        let mut command = manylane(&[&["bench"], words, &["--out", out.to_str().unwrap()]].concat());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
        assert!(output.stdout.is_empty() && !out.exists(), "{words:?}");
    }
}

/// Receivers that need a device, which loopback does not have, whatever the privileges.
#[test]
fn benchmarks_do_not_start_with_receivers_that_cannot_run() {
    for (words, hint) in [
        (&["rx", "--loopback", "--receivers", "lane/mmsg,lane/xdp"][..], "lane/xdp needs a device"),
        (&["gso", "--receivers", "xsk/raw"], "xsk/raw needs a device"),
        (&["batch", "--loopback", "--receivers", "lane/xdp"], "lane/xdp needs a device"),
        (&["rtt", "--loopback", "--contenders", "lane/xdp+spin:50"], "needs a device"),
        (&["rtt", "--loopback", "--cpu-layouts", "rps-server"], "needs a testbed"),
    ] {
        let out = folder("bench-unavailable");
        let output = run(&[&["bench"], words, &["--out", out.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
        assert!(output.stdout.is_empty() && !out.exists(), "{words:?}");
    }
    let file = folder("bench-out-is-a-file");
    fs::write(&file, "").unwrap();
    let output = run(&["bench", "rx", "--loopback", "--out", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("another folder with --out"), "{}", stderr(&output));
}

#[test]
fn loopback_bench_rx_writes_one_document_and_a_report() {
    let out = folder("bench-rx");
    let words =
        ["bench", "rx", "--loopback", "--quick", "--json", "--rate", "5k", "--out", out.to_str().unwrap()];
    let more = ["--threads", "1,2", "--rounds", "2", "--duration", "30ms", "--size", "10,100"];
    let document = document(&[&words[..], &more].concat(), |document| {
        samples(document).all(|sample| sample["delivered"] != 0)
    });
    assert_eq!(document["schema"], "manylane.bench.rx.v1");
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5 * 2 * 2);
    for row in rows {
        let samples = row["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 2);
        // A receiver without CPU delivers all of them after the time that `delivered_pps` is about.
        assert!(samples.iter().all(|sample| sample["delivered"].as_u64().unwrap() > 0), "{row}");
        assert!(row["rx_cpu_ns"].as_f64().unwrap() > 0.0, "{row}");
    }
    let kept = fs::read_to_string(out.join("bench-rx.json")).unwrap();
    assert_eq!(program::document(&kept), document);
    let page = fs::read_to_string(out.join("bench-rx.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("lane/mmsg"));
}

#[test]
fn loopback_bench_replies_counts_every_reply() {
    let out = folder("bench-echo");
    let words =
        ["bench", "echo", "--loopback", "--quick", "--json", "--rate", "2k", "--out", out.to_str().unwrap()];
    let more = ["--threads", "2", "--rounds", "2", "--duration", "50ms", "--recv-buffer", "4M"];
    let document = document(&[&words[..], &more].concat(), |document| {
        samples(document)
            .all(|sample| sample["sent"] == sample["delivered"] && sample["sent"] == sample["received"])
    });
    assert_eq!(document["schema"], "manylane.bench.echo.v1");
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for sample in samples(&document) {
        assert!(sample["sent"].as_u64().unwrap() > 0, "{sample}");
        assert_eq!(
            (&sample["delivered"], &sample["received"]),
            (&sample["sent"], &sample["sent"]),
            "{sample}"
        );
    }
    let page = fs::read_to_string(out.join("bench-echo.html")).unwrap();
    assert!(page.contains("per answered request") && !page.contains("per datagram"));
}

#[test]
fn loopback_bench_rtt_has_a_row_for_each_contender_and_load() {
    let out = folder("bench-rtt");
    let words =
        ["bench", "rtt", "--loopback", "--quick", "--json", "--rate", "2k", "--out", out.to_str().unwrap()];
    let more = ["--rounds", "2", "--duration", "20ms", "--size", "20", "--recv-buffer", "4M", "--contenders"];
    let contenders =
        ["socket/recvfrom", "socket/recvfrom+spin:1000", "lane/mmsg+spin:50", "lane/mmsg+adaptive"];
    let document = document(&[&words[..], &more, &[&contenders.join(",")]].concat(), |document| {
        let all = document["rows"].as_array().unwrap().iter();
        all.filter(|row| row["mode"] == "open").all(|row| row["samples"][0]["delivered"] == 40)
    });
    assert_eq!(document["schema"], "manylane.bench.rtt.v1");
    let rows = document["rows"].as_array().unwrap();
    // A ping-pong, an open loop, and an idle sample.
    assert_eq!(rows.len(), contenders.len() * 3);
    for row in rows {
        assert_eq!(row["samples"].as_array().unwrap().len(), 2);
        let times = ["p50_ns", "p90_ns", "p99_ns", "p999_ns"].map(|name| row[name].as_f64().unwrap());
        let is_idle = row["mode"] == "idle";
        assert!(times.is_sorted() && (times[0] > 0.0) != is_idle, "{row}");
        if row["mode"] == "open" {
            assert_eq!((&row["rate"], &row["arrivals"]), (&2000.0.into(), &"even".into()));
            assert!(row["samples"][0]["sent"] == 40 && row["samples"][0]["delivered"] == 40, "{row}");
        }
    }
    let kept = fs::read_to_string(out.join("bench-rtt.json")).unwrap();
    assert_eq!(program::document(&kept), document);
    let page = fs::read_to_string(out.join("bench-rtt.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("lane/mmsg+adaptive"));
}

#[test]
fn netns_bench_flap_writes_one_document() {
    if !skip::need_live_sender("netns_bench_flap_writes_one_document") {
        return;
    }
    let out = folder("bench-flap");
    let words = ["bench", "flap", "--rate", "2k", "--rounds", "2", "--duration", "50ms", "--out"];
    let more = ["--events", "nothing,sender-link", "--receivers", "lane/mmsg", "--json"];
    let document = document(&[&words[..], &[out.to_str().unwrap()], &more].concat(), |document| {
        let rows = &document["rows"];
        rows[0]["lost_max"] == 0 && rows[1]["refused"].as_f64().is_some_and(|refused| refused > 0.0)
    });
    assert_eq!(document["schema"], "manylane.bench.flap.v1");
    let rows = document["rows"].as_array().unwrap();
    let events: Vec<&str> = rows.iter().map(|row| row["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["nothing", "sender-link"]);
    assert_eq!(rows[0]["lost_max"], 0, "{}", rows[0]);
    assert!(rows[1]["refused"].as_f64().unwrap() > 0.0, "{}", rows[1]);
    let kept = fs::read_to_string(out.join("bench-flap.json")).unwrap();
    assert_eq!(program::document(&kept), document);
    let page = fs::read_to_string(out.join("bench-flap.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("<td>sender-link"));
}

#[test]
fn loopback_added_and_removed_lanes_lose_no_datagrams() {
    let out = folder("bench-churn");
    let words = ["bench", "churn", "--loopback", "--json", "--rate", "2k", "--out", out.to_str().unwrap()];
    let document =
        document(&[&words[..], &["--duration", "1s", "--change-interval", "50ms"]].concat(), |document| {
            document["rows"][0]["lost"] == 0 && document["rows"][0]["added"] != 0
        });
    let row = &document["rows"][0];
    assert_eq!(row["lost"], 0, "{row}");
    assert!(row["added"].as_u64().unwrap() > 0 && row["sent"].as_u64().unwrap() > 0, "{row}");
    let page = fs::read_to_string(out.join("bench-churn.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("<th>lost"));
}

#[test]
fn netns_bench_proxy_compares_both_stacks() {
    let name = "netns_bench_proxy_compares_both_stacks";
    if !skip::need_root(name) || !skip::need_kernel(name, (5, 12), "kernel threads for NAPI") {
        return;
    }
    let out = folder("bench-proxy");
    let words = "bench proxy --contenders proxy/kernel,proxy/xdp --loads keep-alive,connect,paced,alone,bulk \
                 --rate 200 --duration 100ms --rounds 2 --json --out";
    let words: Vec<&str> = words.split_whitespace().chain([out.to_str().unwrap()]).collect();
    let document = document(&words, |_| true);
    let rows = document["rows"].as_array().unwrap();
    let names: Vec<_> =
        rows.iter().map(|row| (row["load"].as_str().unwrap(), row["contender"].as_str().unwrap())).collect();
    let both = |load| [(load, "proxy/kernel"), (load, "proxy/xdp")];
    let expected =
        [&both("keep-alive")[..], &both("connect"), &both("paced"), &[("alone", "proxy/xdp")], &both("bulk")];
    assert_eq!(names, expected.concat());
    for row in rows {
        assert_eq!((row["failed"].as_u64(), row["samples"].as_array().unwrap().len()), (Some(0), 2), "{row}");
        let done = if row["load"] == "bulk" { "bytes_per_s" } else { "requests_per_s" };
        assert!(row[done].as_f64().unwrap() > 0.0 && row["proxy_cpu_ns"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert!(out.join("bench-proxy.html").exists());
}
