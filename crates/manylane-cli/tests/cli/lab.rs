//! `manylane lab` from outside: the rows of each paper, and that a run continues after it was
//! stopped or killed. Some tests take 5 to 15 s: a part measures every receiver, and a run needs at
//! least four parts to be interrupted between them.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use manylane_test_support::wait_for;
use manylane_testbed::skip;
use serde_json::Value;

use crate::lab_rows::{folder, in_table, lab, rows, stderr};

#[test]
fn lab_lists_papers_and_rejects_unknown_ones() {
    let out = folder("lab-list");
    let list = lab(&["list"], &out).output().unwrap();
    let text = String::from_utf8(list.stdout).unwrap();
    for name in ["rivera", "sarma", "orlowsky", "priambodo", "salesforce"] {
        assert!(text.contains(name), "{text}");
    }
    assert_eq!(lab(&["nobody"], &out).output().unwrap().status.code(), Some(2));
    for (parts, unknown) in
        [("nothing-like-that", "nothing-like-that"), ("locks,figre4", "figre4"), ("figure4,", "")]
    {
        let no_part = lab(&["rivera", "--parts", parts], &out).output().unwrap();
        assert_eq!(no_part.status.code(), Some(2), "{parts}");
        let hint = format!("unknown part {unknown:?}: see --list");
        assert!(stderr(&no_part).contains(&hint), "{}", stderr(&no_part));
    }
    assert!(!out.exists(), "a state was created");
}

/// Takes 3 s, and twice as long beside other tests: each method in two rounds.
#[test]
fn loopback_rivera_every_unit_is_counted() {
    let words = ["rivera", "--quick", "--rounds", "2", "--units", "700", "--parts", "/2-readers"];
    let rows = rows("lab-rivera", &words);
    assert_eq!(in_table(&rows, "figure 2").len(), 7);
    assert_eq!(in_table(&rows, "figure 2, CPU time").len(), 7);
    assert_eq!(in_table(&rows, "figure 4").len(), 5);
    let probe = manylane::probe();
    for row in in_table(&rows, "figure 2").iter().chain(&in_table(&rows, "figure 4")) {
        let line = row["line"].as_str().unwrap();
        let device = line.starts_with("lane/xdp");
        let may_lack = device || line.starts_with("lane/uring") && probe.uring.is_err();
        assert!(may_lack || row["value"].is_f64(), "{row}");
        let each = row["samples"].as_array().unwrap().iter().map(|sample| sample.as_f64().unwrap());
        assert!(each.clone().all(|seconds| seconds > 0.0 && seconds < 60.0), "{row}");
        if row["value"].is_f64() {
            // Two rounds. A link whose receiver gets no CPU for long enough rejects frames.
            let counts = &row["counts"];
            let (sent, delivered) = (counts["sent"].as_u64().unwrap(), counts["delivered"].as_u64().unwrap());
            assert!(if device { (1..=1400).contains(&sent) } else { sent == 1400 }, "{row}");
            assert_eq!((delivered, &counts["dropped"]), (sent, &0.into()), "{row}");
        }
    }
    for table in ["table I", "table II"] {
        let own = in_table(&rows, table);
        // Root sees contentions; hold times are not available.
        assert!(own.iter().any(|row| row["column"] == "contentions"), "{table}");
    }
}

#[test]
fn netns_rivera_waits_for_locks_add_up() {
    let name = "netns_rivera_waits_for_locks_add_up";
    if !skip::need_root(name) || !skip::need_kernel(name, (5, 19), "tracepoints of waits for locks") {
        return;
    }
    let words = ["rivera", "--quick", "--units", "20000", "--parts", "locks/2-readers"];
    let rows = rows("lab-locks", &words);
    let callers = in_table(&rows, "callers");
    let counts: Vec<(&str, u64)> = callers
        .iter()
        .filter(|row| row["column"] == "per million" && row["value"].is_f64())
        .map(|row| (row["line"].as_str().unwrap(), row["counts"]["contentions"].as_u64().unwrap()))
        .collect();
    let all: Vec<&(&str, u64)> = counts.iter().filter(|(line, _)| line.ends_with(": all locks")).collect();
    assert_eq!(all.len(), 7, "{counts:?}");
    for (line, sum) in all {
        let reader = line.trim_end_matches("all locks");
        let own = counts.iter().filter(|(line, _)| line.starts_with(reader) && !line.ends_with("all locks"));
        assert_eq!(own.map(|(_, count)| count).sum::<u64>(), *sum, "{reader}");
    }
    assert_eq!((in_table(&rows, "table I").len(), in_table(&rows, "table III").len()), (6, 6));
}

/// Takes 4 s, and twice as long beside other tests: each cost is measured once.
#[test]
fn sarma_costs_have_a_figure_or_a_reason() {
    let rows = rows("lab-sarma", &["sarma", "--quick", "--rounds", "1", "--parts", "sarma/table"]);
    let printed = |row: &&&Value| row["printed"].is_f64();
    assert_eq!(in_table(&rows, "table 1").iter().filter(printed).count(), 10);
    assert_eq!(in_table(&rows, "table 1").len(), 11);
    assert_eq!(in_table(&rows, "table 3").len(), 12);
    let writes = in_table(&rows, "table 3, writes");
    let paper: Vec<f64> = writes.iter().map(|row| row["printed"].as_f64().unwrap()).collect();
    assert_eq!(paper, [2.719, 2.976]);
    assert!(writes.iter().all(|row| row["value"].as_f64().unwrap() > 0.0), "{writes:?}");
    assert!(in_table(&rows, "table 2").len() >= 13);
}

#[test]
fn loopback_orlowsky_every_message_is_taken() {
    let rows = rows("lab-orlowsky", &["orlowsky", "--quick", "--rounds", "1", "--parts", "local/64-bytes"]);
    let own = in_table(&rows, "local experiment");
    // Five methods with three numbers of messages per call, and three numbers above the maximum.
    assert_eq!((own.len(), rows.len()), (18, 18));
    let too_many =
        own.iter().filter(|row| row["why_not"].as_str().is_some_and(|why| why.contains("UIO_MAXIOV")));
    assert_eq!(too_many.count(), 3);
    for row in own.iter().filter(|row| row["value"].is_f64()) {
        assert_eq!(
            (&row["counts"]["sent"], &row["counts"]["delivered"]),
            (&2048.into(), &2048.into()),
            "{row}"
        );
    }
    let regular = |row: &&&Value| row["column"] == "socket/recvmmsg" && row["value"].is_f64();
    assert_eq!(own.iter().filter(regular).count(), 3);
}

/// Takes 9 s: each method of both tables is started and measured.
#[test]
fn priambodo_runs_have_all_methods() {
    // A virtual machine may give a receiver no time in 300 ms.
    let measure = |duration| {
        let words = ["priambodo", "--quick", "--rounds", "1", "--duration", duration, "--parts", "run-1"];
        rows("lab-priambodo", &words)
    };
    let received = |rows: &Vec<Value>| !in_table(rows, "table 1").iter().any(|row| row["value"] == 0.0);
    let rows = Some(measure("300ms")).filter(received).unwrap_or_else(|| measure("5s"));
    assert_eq!((in_table(&rows, "table 1").len(), in_table(&rows, "table 2").len()), (9, 8));
    if !skip::need_live_sender("priambodo_runs_have_all_methods") {
        return;
    }
    for (table, gap) in [("table 1", "table 1, gap"), ("table 2", "table 2, gap")] {
        let value = |row: &Value| row["value"].as_f64();
        let own = in_table(&rows, table);
        let default = value(own.iter().find(|row| row["column"] == "default").unwrap()).unwrap();
        let gaps = in_table(&rows, gap);
        assert_eq!(gaps.len(), own.len() - 1);
        for row in gaps {
            let of = own.iter().find(|cell| cell["column"] == row["column"]).unwrap();
            let expected = value(of).map(|value| 100.0 * (value / default - 1.0));
            assert_eq!(value(row).is_some(), expected.is_some(), "{row}");
            assert!(
                (value(row).unwrap_or(0.0) - expected.unwrap_or(0.0)).abs() < 1e-6,
                "{row}: {expected:?}"
            );
        }
    }
    for row in in_table(&rows, "table 1").into_iter().filter(|row| row["column"] != "NUMA, other node") {
        let count = |name: &str| row["counts"][name].as_u64().unwrap_or_else(|| panic!("{row}"));
        assert!(count("delivered") > 0 && count("delivered") + count("dropped") <= count("sent"), "{row}");
    }
}

/// Takes 4 s: a proxy of each stack, with each generator.
#[test]
fn salesforce_proxies_answer_requests() {
    let words =
        ["salesforce", "--quick", "--rounds", "1", "--duration", "200ms", "--parts", "proxies/proxy/"];
    let rows = rows("lab-salesforce", &words);
    let count = |table: &str| in_table(&rows, table).len();
    // Two proxies, two generators; two percentiles of each.
    assert_eq!(["figure 2", "figure 3", "CPU per request"].map(count), [4, 8, 4]);
    let name = "salesforce_proxies_answer_requests";
    let cpus = manylane_measure::machine::allowed_cpus().len();
    if !skip::need_root(name)
        || !skip::need_kernel(name, (5, 12), "threaded NAPI")
        || !skip::need(name, cpus > 1, "the proxy needs a CPU of its own")
    {
        return;
    }
    for row in in_table(&rows, "figure 2") {
        let may_lack = row["column"] == "wrk" && row["why_not"] == "wrk is not installed";
        assert!(may_lack || row["value"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        assert!(may_lack || row["counts"]["failed"] == 0, "{row}");
    }
}

/// Takes 7 s: six servers, under four losses and twice with another connection.
#[test]
fn salesforce_congestion_controls_share_a_link() {
    let words = ["salesforce", "--quick", "--rounds", "1", "--duration", "60ms", "--parts", "congestion/"];
    let rows = rows("lab-salesforce-congestion", &words);
    let name = "salesforce_congestion_controls_share_a_link";
    if !skip::need_root(name) {
        return;
    }
    let count = |table: &str| in_table(&rows, table).len();
    assert_eq!(["throughput by loss", "fairness"].map(count), [24, 18]);
    for row in in_table(&rows, "throughput by loss").iter().chain(&in_table(&rows, "fairness")) {
        let lacks = row["why_not"].as_str().is_some_and(|why| why.contains("the kernel does not have"));
        assert!(lacks || row["value"].as_f64().is_some_and(|value| value >= 0.0), "{row}");
    }
}

const PARTS: usize = 4;
const RUN: [&str; 8] = ["rivera", "--quick", "--rounds", "1", "--units", "60000", "--parts", "figure4"];

fn parts_done(state: &PathBuf) -> usize {
    fs::read_to_string(state).map_or(0, |text| text.matches('\n').count().saturating_sub(1))
}

/// Starts a run, and ends it by `end` between its first part and its last one: again, up to ten
/// times, as long as it was over before this test had CPU.
fn interrupt_run<T>(out: &PathBuf, state: &PathBuf, mut end: impl FnMut(Child) -> T) -> T {
    for _ in 0..10 {
        let seen = end(start_run(out, state));
        if parts_done(state) < PARTS {
            return seen;
        }
        fs::remove_dir_all(out).unwrap();
    }
    panic!("ten runs were over before they were interrupted");
}

/// Starts the run, and waits until one part is done.
fn start_run(out: &PathBuf, state: &PathBuf) -> Child {
    let mut child = lab(&RUN, out).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let progress = || (parts_done(state), child.try_wait().unwrap());
    let (parts, end) =
        wait_for("the first part (parts, status)", progress, |(parts, end)| *parts > 0 || end.is_some());
    assert!(parts > 0, "it ended early: {end:?}");
    child
}

fn places(rows: &[Value]) -> BTreeSet<String> {
    rows.iter().map(|row| format!("{} {} {}", row["table"], row["line"], row["column"])).collect()
}

/// Takes 6 s: a run until it is killed, and what is left of it.
#[test]
fn a_killed_run_is_resumed() {
    let out = folder("lab-killed");
    let state = out.join("lab-rivera.state.jsonl");
    interrupt_run(&out, &state, |mut child| {
        child.kill().unwrap();
        child.wait().unwrap();
    });
    let before = fs::read_to_string(&state).unwrap();
    let done = parts_done(&state);
    assert!((1..PARTS).contains(&done), "{done} parts");
    // Other settings make another run.
    let file = state.to_str().unwrap();
    let other = lab(&["rivera", "--quick", "--resume", file], &out).output().unwrap();
    assert_eq!(other.status.code(), Some(1));
    assert!(stderr(&other).contains("other settings"), "{}", stderr(&other));
    let other = lab(&["sarma", "--quick", "--resume", file], &out).output().unwrap();
    assert!(stderr(&other).contains("a run of rivera, not of sarma"), "{}", stderr(&other));
    let resumed = lab(&[&RUN[..], &["--resume", file, "--json"]].concat(), &out).output().unwrap();
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    let after = fs::read_to_string(&state).unwrap();
    // What was complete before is unchanged, byte by byte, and was not repeated.
    let whole = &before[..=before.rfind('\n').unwrap()];
    assert!(after.starts_with(whole));
    assert_eq!(parts_done(&state), PARTS);
    let document: Value = serde_json::from_slice(&resumed.stdout).unwrap();
    let resumed = document["rows"].as_array().unwrap();
    assert_eq!(places(resumed).len(), 20, "five receivers, four numbers of readers");
    for row in resumed.iter().filter(|row| row["value"].is_f64()) {
        assert_eq!(row["samples"].as_array().unwrap().len(), 1, "{row}");
        // The testbed's sender is not throttled: on a busy machine, a ring may be full.
        let least = if row["line"].as_str().unwrap().starts_with("lane/xdp") { 1 } else { 60_000 };
        assert!((least..=60_000).contains(&row["counts"]["delivered"].as_u64().unwrap()), "{row}");
    }
}

#[test]
fn roots_resume_refuses_links_and_files_with_two_names() {
    if !skip::need_root("roots_resume_refuses_links_and_files_with_two_names") {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let file = |name: &str| out.path().join(name);
    fs::set_permissions(out.path(), Permissions::from_mode(0o777)).unwrap();
    fs::write(file("state"), "of another program\n").unwrap();
    let resume = |name: &str| {
        let path = file(name);
        let output = lab(&["rivera", "--resume", path.to_str().unwrap()], &file("out")).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        stderr(&output)
    };
    assert!(resume("state").contains("not the state of a lab run"));
    symlink(file("state"), file("link")).unwrap();
    let text = resume("link");
    assert!(text.contains("it is a link"), "{text}");
    fs::hard_link(file("state"), file("second")).unwrap();
    let text = resume("state");
    assert!(text.contains("it is a link"), "{text}");
}

#[test]
fn a_failed_part_is_retried() {
    let out = folder("lab-failed");
    let state = out.join("lab-rivera.state.jsonl");
    let words = ["rivera", "--quick", "--rounds", "1", "--units", "700", "--parts", "figure4/1-readers"];
    let first = lab(&words, &out).output().unwrap();
    assert!(first.status.success(), "{}", stderr(&first));
    let text = fs::read_to_string(&state).unwrap();
    let (head, part) = text.trim_end().split_once('\n').unwrap();
    // As if the part had failed as a whole.
    let mut part: Value = serde_json::from_str(part).unwrap();
    let mut row = part["rows"][0].clone();
    for (name, value) in [("table", "failed"), ("why_not", "the device was away"), ("column", "")] {
        row[name] = value.into();
    }
    (row["line"], row["value"], row["samples"]) =
        (part["part"].clone(), Value::Null, Value::Array(Vec::new()));
    part["rows"] = Value::Array(vec![row]);
    let failed = format!("{head}\n{part}\n");
    fs::write(&state, &failed).unwrap();
    let file = state.to_str().unwrap();
    let again = lab(&[&words[..], &["--resume", file, "--json"]].concat(), &out).output().unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
    assert!(
        stderr(&again).contains("0 parts are already done, 1 failed and run again"),
        "{}",
        stderr(&again)
    );
    let document: Value = serde_json::from_slice(&again.stdout).unwrap();
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(places(rows).len(), 5, "five receivers, and nothing that failed");
    assert!(fs::read_to_string(&state).unwrap().starts_with(&failed), "what was known is kept");
    // Now no part is left to retry.
    let none = lab(&[&words[..], &["--resume", file, "--json"]].concat(), &out).output().unwrap();
    assert!(stderr(&none).contains("1 parts are already done\n"), "{}", stderr(&none));
    assert_eq!(fs::read_to_string(&state).unwrap().lines().count(), 3);
    let document: Value = serde_json::from_slice(&none.stdout).unwrap();
    assert_eq!(document["rows"].as_array().unwrap(), rows);
}

#[test]
fn an_interrupt_prints_how_to_resume() {
    let out = folder("lab-stopped");
    let state = out.join("lab-rivera.state.jsonl");
    let output = interrupt_run(&out, &state, |child| {
        let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        child.wait_with_output().unwrap()
    });
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let told = stderr(&output);
    assert!(told.contains("parts are done and saved") && told.contains("--resume"), "{told}");
    assert!(output.stdout.is_empty() && parts_done(&state) < PARTS);
}
