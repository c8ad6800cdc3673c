//! Small runs of the benchmarks: at a rate that is easy for every receiver, each receives and
//! answers all requests, and the sums are exact.
//!
//! Most tests take 5 to 20 s: they take samples of all receivers, up to 26, and each sample starts
//! a receiver, warms it up, sends for 200 ms and closes it, which takes half a second or more.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed test is what they make")]

use std::net::UdpSocket;
use std::sync::atomic::AtomicBool;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use manylane_bench::experiments::batch::{self, Plan, RecvMethod};
use manylane_bench::experiments::flap::{self, Event};
use manylane_bench::experiments::flood;
use manylane_bench::experiments::replies::{self, SendMethod};
use manylane_bench::receivers::{Kind, ReceiverOptions, Work};
use manylane_bench::report;
use manylane_bench::schema::FlapRow;
use manylane_bench::work::SyntheticWork;
use manylane_bench::{Controller, Load, Options, Setup, measure};
use manylane_test_support::wait_for;
use manylane_testbed::reply_count::{CountHook, ReplyCounter};
use manylane_testbed::skip::{self, Forced};
use manylane_testbed::{Layout, Testbed};

/// Held for reading by tests that count, and for writing by the flood, which makes them lose
/// datagrams: the kernel queues what crosses a veth pair, or loopback, in one queue for each CPU.
static BACKLOG: RwLock<()> = RwLock::new(());

fn without_floods() -> RwLockReadGuard<'static, ()> {
    BACKLOG.read().unwrap_or_else(PoisonError::into_inner)
}

/// A testbed, and no flood beside it.
fn testbed(test: &str, links: usize) -> Option<(RwLockReadGuard<'static, ()>, Setup)> {
    skip::need_live_sender(test).then(|| (without_floods(), Setup::testbed(None, links).unwrap()))
}

/// True if io_uring is available. Reports a skip of `test` if not: it runs without.
fn has_uring(test: &str) -> bool {
    skip::need_uring(test, manylane::probe().uring)
}

fn receiver(setup: &Setup, work: Work, threads: usize) -> ReceiverOptions {
    // Not pinned, with a queue in which everything has room, whatever else the machine does.
    ReceiverOptions {
        work,
        recv_buffer: 64 << 20,
        cpus: Vec::new(),
        ring: 4096,
        ..setup.receiver(threads, 20)
    }
}

fn load() -> Load {
    Load { pps: Some(4000.0), duration: Duration::from_millis(200), size: 20, flows: 16, gso: false }
}

/// All that was sent was done, and all of it by the application. Returns what `around` says of the
/// sample that was checked: it is called before each sample, and its result after it.
fn check_all_done_around<T, E: FnOnce() -> T>(
    setup: &mut Setup,
    kind: Kind,
    (work, threads): (Work, usize),
    around: impl Fn() -> E,
) -> T {
    let options = receiver(setup, work, threads);
    // Again, as long as a sample left datagrams behind, because a receiver had no CPU for longer
    // than it waits for stragglers, or as its sender had none.
    let mut take = || {
        let end = around();
        (measure(setup, kind, &options, &load(), 0).unwrap(), end())
    };
    let (mut sample, mut seen) = take();
    for _ in 0..10 {
        if sample.sent > 330
            && sample.sent == sample.delivered
            && sample.received.is_none_or(|n| n == sample.sent)
        {
            break;
        }
        (sample, seen) = take();
    }
    let what = format!("{kind}, {work:?}, {threads} threads: {sample:?}");
    assert!(sample.sent > 100, "{what}");
    assert_eq!((sample.delivered, sample.kernel_dropped, sample.loss), (sample.sent, 0, 0.0), "{what}");
    assert_eq!(sample.received, (work == Work::Echo).then_some(sample.sent), "{what}");
    assert!(sample.rx_cpu_ns > 0.0, "{what}");
    seen
}

fn check_all_done(setup: &mut Setup, kind: Kind, work: Work, threads: usize) {
    check_all_done_around(setup, kind, (work, threads), || || ());
}

#[test]
fn loopback_every_request_is_answered_and_counted() {
    let _quiet = without_floods();
    let has_uring = has_uring("loopback_every_request_is_answered_and_counted");
    let can_run =
        |kind: &Kind| !kind.needs_device() && !kind.needs_module() && (has_uring || !kind.needs_uring());
    for kind in Kind::ALL.into_iter().filter(can_run) {
        let mut setup = Setup::loopback(None);
        for threads in [1, 2] {
            check_all_done(&mut setup, kind, Work::Echo, threads);
        }
    }
}

#[test]
fn netns_every_request_is_answered_and_counted() {
    let Some((_quiet, mut setup)) = testbed("netns_every_request_is_answered_and_counted", 1) else { return };
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.needs_module()) {
        for threads in [1, 2] {
            check_all_done(&mut setup, kind, Work::Echo, threads);
        }
    }
}

#[test]
fn netns_synthetic_work_is_done_for_every_datagram() {
    let Some((_quiet, mut setup)) = testbed("netns_synthetic_work_is_done_for_every_datagram", 1) else {
        return;
    };
    const NANOS: u64 = 100_000;
    let synthetic_work = SyntheticWork::calibrate(NANOS);
    let load = Load { pps: Some(400.0), ..load() };
    for (kind, work) in Kind::ALL
        .into_iter()
        .filter(|kind| !kind.needs_module())
        .flat_map(|kind| [(kind, Work::Count), (kind, Work::Echo)])
    {
        let options = ReceiverOptions { synthetic_work, ..receiver(&setup, work, 1) };
        // Again, as long as a sender without CPU sends few.
        let mut samples = (0..10).map(|_| measure(&mut setup, kind, &options, &load, 0).unwrap());
        let sample = samples.find(|sample| sample.delivered > 20);
        let sample = sample.unwrap_or_else(|| panic!("{kind}, {work:?}: few datagrams in ten samples"));
        let what = format!("{kind}, {work:?}: {sample:?}");
        // Less than asked for is what a CPU in a hurry makes of it; without, all are far
        // below.
        assert!(sample.rx_cpu_ns > 0.5 * NANOS as f64, "{what}");
    }
}

#[test]
fn netns_traffic_arrives_over_every_interface() {
    const LINKS: usize = 3;
    let Some((_quiet, mut setup)) = testbed("netns_traffic_arrives_over_every_interface", LINKS) else {
        return;
    };
    assert!(setup.bind_addr().ip().is_unspecified() && setup.device_names().len() == LINKS);
    let host = setup.hosts().unwrap().1.clone();
    let arrived = &|| (0..LINKS).map(|link| host.device_counters(link).unwrap().rx_packets);
    let shares = || {
        let before: Vec<u64> = arrived().collect();
        move || arrived().zip(before).map(|(now, before)| now - before).collect::<Vec<u64>>()
    };
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.needs_module()) {
        let shares = check_all_done_around(&mut setup, kind, (Work::Count, 2), shares);
        // The links take turns, in two runs that end anywhere.
        let (min, max) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(*min > 100 && max - min <= 2, "{kind}: {shares:?}");
        check_all_done(&mut setup, kind, Work::Echo, 2);
    }
}

#[test]
fn netns_reply_count_affects_only_replies() {
    if !skip::need_root("netns_reply_count_affects_only_replies") {
        return;
    }
    let _quiet = without_floods();
    // Hosts that have to find each other first: what is no answer must pass.
    let testbed = Testbed::new(&Layout { neighbours: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (ipv6, counter) in
        [false, true].into_iter().flat_map(|v6| CountHook::ALL.map(|counter| (v6, counter)))
    {
        let (server, other) = b.run(|| {
            (UdpSocket::bind((b.ip(0, ipv6), 0)).unwrap(), UdpSocket::bind((b.ip(0, ipv6), 0)).unwrap())
        });
        let client = a.run(|| UdpSocket::bind((a.ip(0, ipv6), 0)).unwrap());
        client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let replies = ReplyCounter::attach(a, &[0], server.local_addr().unwrap().port(), counter).unwrap();
        for _ in 0..5 {
            server.send_to(b"counted", client.local_addr().unwrap()).unwrap();
        }
        other.send_to(b"passed", client.local_addr().unwrap()).unwrap();
        let mut buffer = [0; 16];
        // Only the one that is no answer comes through, and it was the last.
        assert_eq!(client.recv(&mut buffer).unwrap(), 6);
        let what = format!("five replies, IPv6 {ipv6}, {counter}");
        wait_for(&what, || replies.count().unwrap(), |count| *count >= 5);
        assert_eq!(replies.count().unwrap(), 5, "IPv6 {ipv6}, {counter}");
    }
}

struct NoProgress(AtomicBool);

impl Controller for NoProgress {
    fn progress(&mut self, _done: f64, _what: &str) {}

    fn stop(&self) -> &AtomicBool {
        &self.0
    }
}

fn options(duration: Duration) -> Options {
    Options {
        sizes: vec![20],
        duration,
        pps: Some(2000.0),
        flows: 8,
        recv_buffer: 64 << 20,
        ..Options::new(flap::RECEIVERS.to_vec())
    }
}

#[test]
fn netns_every_datagram_is_counted_across_flaps() {
    let Some((_quiet, mut setup)) = testbed("netns_every_datagram_is_counted_across_flaps", 1) else {
        return;
    };
    let options = options(Duration::from_millis(200));
    let mut run =
        |events| flap::run(&mut setup, &options, events, &mut NoProgress(AtomicBool::new(false))).unwrap();
    let document = run(&Event::ALL);
    assert_eq!(document.schema, "manylane.bench.flap.v1");
    let possible = |kind: &Kind| Event::ALL.iter().filter(|event| event.is_supported(*kind)).count();
    assert_eq!(document.rows.len(), flap::RECEIVERS.iter().map(possible).sum::<usize>());
    // Again, as long as a sender or receiver had no CPU for longer than a sample waits.
    let is_whole = |rows: &[FlapRow]| {
        rows.iter().all(|row| {
            let seen = &row.samples[0];
            seen.sample.delivered > 250 && (row.event.ends_with("-link") || seen.lost == 0)
        })
    };
    let mut rows = document.rows;
    for _ in 0..5 {
        if is_whole(&rows) {
            break;
        }
        rows = run(&Event::ALL).rows;
    }
    check_flaps(&rows);
    // Again, as long as a sender had no CPU while its link was down: nothing was refused then.
    let is_refused = |rows: &[FlapRow]| {
        rows.iter().filter(|row| row.event.ends_with("-link")).all(|row| row.samples[0].refused > 0)
    };
    for _ in 0..10 {
        if is_whole(&rows) && is_refused(&rows) {
            check_flaps(&rows);
            return;
        }
        rows = run(&[Event::ReceiverLink, Event::SenderLink]).rows;
    }
    panic!("none is refused while a link is down: {rows:?}");
}

/// Each datagram is delivered, lost or refused.
fn check_flaps(rows: &[FlapRow]) {
    for row in rows {
        let what = format!("{} beside {}: {:?}", row.event, row.figures.receiver, row.samples);
        let [seen] = &row.samples[..] else { panic!("{what}") };
        assert_eq!(seen.sample.sent, seen.sample.delivered + seen.lost, "{what}");
        // Whatever happened, traffic flows again after it: half of it was before.
        assert!(seen.sample.delivered > 250, "{what}");
        if !row.event.ends_with("-link") {
            assert_eq!((seen.lost, seen.refused), (0, 0), "{what}");
        }
    }
}

#[test]
fn flaps_need_a_testbed() {
    let mut setup = Setup::loopback(None);
    let options = options(Duration::from_millis(1));
    let err =
        flap::run(&mut setup, &options, &Event::ALL, &mut NoProgress(AtomicBool::new(false))).unwrap_err();
    assert!(err.to_string().contains("testbed"), "{err}");
}

/// Max datagrams of a GRO message, which lanes receive as one message: `UDP_MAX_SEGMENTS`.
const GSO_SEGMENTS_MAX: u64 = 64;

/// Every way takes all that was sent, at every size and number of messages per call. A device that
/// works in NAPI makes GRO messages (`gro`).
fn check_batches(setup: &mut Setup, by: &[RecvMethod], sizes: &[usize], gro: bool) {
    let options = Options { sizes: sizes.to_vec(), ..options(Duration::ZERO) };
    let plan = Plan { methods: by.to_vec(), messages: vec![1, 64, 1024], fills: 1 };
    let document = batch::run(setup, &options, &plan, &mut NoProgress(AtomicBool::new(false))).unwrap();
    assert_eq!(document.schema, "manylane.bench.batch.v1");
    assert_eq!(document.rows.len(), by.len() * sizes.len() * 3);
    for row in &document.rows {
        let [seen] = &row.samples[..] else { panic!("{row:?}") };
        assert_eq!(seen.sent, seen.delivered, "{row:?}");
        // A link rejects what it cannot deliver meanwhile: on Linux 6.1, whose interrupts wait for
        // a thread, some of so many at once.
        assert!(seen.sent == 2048 || gro && !skip::is_kernel((6, 12)) && seen.sent > 0, "{row:?}");
        let in_one =
            row.messages as u64 * if gro && row.receiver.starts_with("lane/") { GSO_SEGMENTS_MAX } else { 1 };
        assert!(seen.calls >= seen.sent / in_one, "{row:?}");
    }
    // The kernel adds a thread's time at its ticks and when it sleeps: one batch may be too short.
    assert!(document.rows.iter().map(|row| row.rx_cpu_ns).sum::<f64>() > 0.0, "{:?}", document.rows);
}

#[test]
fn loopback_every_method_receives_whole_batches() {
    let _quiet = without_floods();
    let has_uring = has_uring("loopback_every_method_receives_whole_batches");
    let can_run =
        |by: &RecvMethod| !by.needs_device() && !by.needs_module() && (has_uring || !by.needs_uring());
    let by: Vec<RecvMethod> = RecvMethod::ALL.into_iter().filter(can_run).collect();
    check_batches(&mut Setup::loopback(None), &by, &[64, 8192], false);
}

#[test]
fn netns_every_method_receives_whole_batches() {
    if let Some((_quiet, mut setup)) = testbed("netns_every_method_receives_whole_batches", 1) {
        let by: Vec<RecvMethod> = RecvMethod::ALL.into_iter().filter(|by| !by.needs_module()).collect();
        check_batches(&mut setup, &by, &[64], true);
    }
}

#[test]
fn loopback_every_reply_is_sent() {
    let _quiet = without_floods();
    let setup = Setup::loopback(None);
    let options = Options { sizes: vec![64, 8192], ..options(Duration::ZERO) };
    let nobody = &mut NoProgress(AtomicBool::new(false));
    let by = if has_uring("loopback_every_reply_is_sent") {
        SendMethod::ALL.to_vec()
    } else {
        vec![SendMethod::Sendmmsg]
    };
    let document = replies::run(&setup, &options, &by, &[1, 64], nobody).unwrap();
    assert_eq!((document.schema.as_str(), document.rows.len()), ("manylane.bench.replies.v1", 4 * by.len()));
    for row in &document.rows {
        assert!(row.samples.iter().all(|seen| seen.sent == seen.delivered && seen.sent > 0), "{row:?}");
    }
}

#[test]
fn netns_every_part_of_a_flood_is_measured() {
    let name = "netns_every_part_of_a_flood_is_measured";
    if !skip::need_live_sender(name) {
        return;
    }
    let _alone = BACKLOG.write().unwrap_or_else(PoisonError::into_inner);
    let mut setup = Setup::testbed(None, flood::LINKS).unwrap();
    let why = "the flood and the lane need a CPU each";
    if !skip::need_unless_forced(name, setup.sender_cpu().is_some(), Forced::Cpus, why) {
        return;
    }
    // The limit lets in less than the flood has, whatever the machine does meanwhile.
    let options = Options { rounds: 2, pps: Some(50_000.0), ..options(Duration::from_millis(200)) };
    let plan = flood::Plan {
        parts: flood::Part::ALL.to_vec(),
        limit: "100/10".parse().unwrap(),
        sources: Duration::from_millis(400),
    };
    let document = flood::run(&mut setup, &options, &plan, &mut NoProgress(AtomicBool::new(false))).unwrap();
    assert_eq!((document.schema.as_str(), document.rows.len()), ("manylane.bench.flood.v1", 3 + 2 + 5));
    for row in &document.rows {
        let what = format!("{} {}: {row:?}", row.part, row.variant);
        assert_eq!(row.samples.len(), 2, "{what}");
        assert_eq!(row.samples.iter().any(|seen| seen.limited > 0), row.variant == "limit", "{what}");
        for seen in &row.samples {
            let flooded = !matches!(&*row.variant, "no-flood" | "busy-thread") || row.part == "clients";
            assert_eq!(flooded, seen.sample.sent > 0, "{what}");
            let held = row.variant == "limit";
            // A stretch of new sources is cut out of a longer one: what was under way at its ends
            // is counted on one side.
            let all_were_sent = row.part == "sources" || seen.sample.delivered <= seen.sample.sent;
            // A sender that was given no CPU may have sent no more than the limit lets in.
            let was_limited = seen.limited > 0 || seen.sample.sent == seen.sample.delivered;
            assert!(if held { was_limited } else { seen.limited == 0 }, "{what}");
            assert!(all_were_sent, "{what}");
            assert_eq!(
                seen.clients.map(|clients| clients.asked),
                (row.part == "clients").then_some(200),
                "{what}"
            );
            let watched: Vec<&str> = seen.pauses.iter().map(|pauses| &*pauses.thread).collect();
            match &*row.part {
                "clients" => assert!(watched.is_empty(), "{what}"),
                "program" => {
                    assert_eq!(watched, ["program", "program beside the sender"], "{what}");
                    let (on_lane, beside) = (&seen.pauses[0], &seen.pauses[1]);
                    assert_eq!(on_lane.longest_apart_ms.is_some(), flooded, "{what}");
                    assert!(
                        on_lane.apart.iter().all(|gap| gap.sender_ms == 0.0 && gap.lane_ms <= gap.waited_ms),
                        "{what}"
                    );
                    assert!(beside.apart.iter().all(|gap| gap.lane_ms == 0.0), "{what}");
                    assert_eq!(beside.longest_apart_ms.is_some(), row.variant != "no-flood", "{what}");
                    let made = beside.apart.iter().map(|gap| gap.sender_ms).sum::<f64>();
                    let waited = beside.apart.iter().map(|gap| gap.waited_ms).sum::<f64>();
                    // Where there is a maker it may have had nothing of a stretch so short: others
                    // run here, too.
                    assert!(made <= waited + 1e-6 && (row.variant != "no-flood" || made == 0.0), "{what}");
                }
                _ => {
                    assert_eq!(watched, ["lane", "observer", "sender"], "{what}");
                    let memory = seen.memory.as_ref().unwrap();
                    assert_eq!(memory.new_sources > 0, row.variant == "new-sources", "{what}");
                    assert!(memory.rss_kib[0] > 0 && seen.sample.delivered > 0, "{what}");
                }
            }
            for pauses in &seen.pauses {
                assert!(
                    pauses.histogram.iter().sum::<u64>() >= pauses.over_1ms && pauses.longest_ms > 0.0,
                    "{what}"
                );
            }
        }
    }
    let page = report::html(&document).unwrap();
    assert_eq!(page.matches("<svg").count(), 2 + 2 + 3);
}

#[test]
fn floods_need_a_testbed_with_two_links() {
    let plan =
        flood::Plan { parts: Vec::new(), limit: "100".parse().unwrap(), sources: Duration::from_millis(1) };
    let options = options(Duration::from_millis(1));
    let mut setup = Setup::loopback(None);
    let err = flood::run(&mut setup, &options, &plan, &mut NoProgress(AtomicBool::new(false))).unwrap_err();
    assert!(err.to_string().contains("testbed"), "{err}");
}
