//! Engine `xdp` in a process that becomes user `nobody` after the socket is open, permanently and
//! with all its threads.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use crate::faults_support::{Child, NOBODY, is_child, report, wait_for_parent};
use crate::netns_support::{client, wait_until};
use crate::xdp_support::{PORT, ipv4_layout, programs, testbed, xdp_count};
use log::{Level, LevelFilter, Log, Metadata, Record};
use manylane::{Builder, Engine};
use manylane_test_support::{become_user, wait_for};
use manylane_testbed::skip;
use manylane_tests::{Serving, TEST_TIMEOUT};

/// An address that is added to the child's host when the child has dropped its privileges.
const ADDED_ADDR: &str = "10.77.0.77";

/// Forwards warnings of ours, without those of libraries.
struct Warnings(SyncSender<String>);

impl Log for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn && metadata.target().starts_with("manylane")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // Warnings are dropped if there are too many.
            _ = self.0.try_send(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Every thread of this process has the user and the group `nobody`, and no permitted, effective
/// or ambient capabilities.
fn assert_nobody() {
    let mut threads = 0;
    for thread in fs::read_dir("/proc/self/task").unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        for line in status.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let values: Vec<&str> = value.split_whitespace().collect();
            match name {
                "Uid" | "Gid" => assert_eq!(values, [NOBODY.to_string().as_str(); 4], "{status}"),
                "Groups" => assert!(values.is_empty(), "{status}"),
                "CapPrm" | "CapEff" | "CapAmb" => {
                    assert_eq!(u64::from_str_radix(values[0], 16), Ok(0), "{status}");
                }
                _ => {}
            }
        }
        threads += 1;
    }
    // The harness's two, the one that serves, two lanes, and the one that follows routes.
    assert!(threads >= 6, "{threads}");
}

#[test]
#[ignore = "started by netns_xdp_works_as_nobody"]
fn child_serves_xdp_as_nobody() {
    if !is_child("child_serves_xdp_as_nobody") {
        return;
    }
    let (sender, warnings) = mpsc::sync_channel(100);
    log::set_boxed_logger(Box::new(Warnings(sender))).unwrap();
    log::set_max_level(LevelFilter::Warn);
    let mut builder = Builder::new((IpAddr::from([0; 4]), PORT)).unwrap();
    let socket = builder.engine(Engine::Xdp).lanes(2).capture(false).open().unwrap();
    let (later, to_later) = (ADDED_ADDR.parse::<IpAddr>().unwrap(), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&to_later);
    let serving = Serving::start(socket, move |batch, out| {
        for datagram in batch {
            if datagram.local().ip() == later {
                counted.fetch_add(1, Ordering::Relaxed);
            }
            out.reply_borrowed(&datagram, datagram.payload());
        }
    });
    let handle = serving.handle.clone();
    let total = || handle.counters().total();
    // All threads run by now, with all privileges.
    report("open");
    wait_for("a datagram", total, |total| total.delivered > 0);
    become_user(NOBODY).unwrap();
    assert_nobody();
    // Only the user that owns a port may join it.
    let err = handle.add_lane().unwrap_err();
    assert_eq!(err.kind(), manylane::ErrorKind::InUse, "{err}");
    report("nobody");
    // Addresses are followed.
    wait_until("a datagram of the later lane", &handle, || to_later.load(Ordering::Relaxed) > 0);
    let before = total().delivered_by_bypass;
    wait_for("a datagram by XDP", total, |total| total.delivered_by_bypass > before);
    report("followed");
    // The device is removed.
    wait_for("the device to be gone", || handle.device_queues(), Vec::is_empty);
    assert_eq!(warnings.recv_timeout(TEST_TIMEOUT).unwrap(), "engine xdp: device link0 was removed");
    let of_first = total().delivered_by_bypass;
    report("gone");
    // It is added again, and its datagrams arrive through the kernel only.
    let warning = warnings.recv_timeout(TEST_TIMEOUT).unwrap();
    assert!(warning.contains("link0") && warning.contains("CAP_BPF and CAP_NET_ADMIN"), "{warning}");
    report("warned");
    wait_for_parent();
    assert_nobody();
    assert!(handle.device_queues().is_empty());
    assert_eq!(xdp_count(&handle, "redirected"), 0);
    let total = serving.stop().unwrap().total();
    assert_eq!(
        (total.sent, total.lost(), total.delivered_by_bypass),
        (total.delivered, 0, of_first),
        "{total:#?}"
    );
    assert_eq!(total.arrived(), total.delivered, "{total:#?}");
    let more: Vec<String> = warnings.try_iter().collect();
    assert!(more.is_empty(), "said once: {more:?}");
    report(&format!("{} {}", total.delivered, total.delivered_by_bypass));
}

/// Peers, routes, addresses and links change, and the unprivileged process continues past the
/// stack. It cannot attach to a device that is added again: it logs that, and serves through the
/// companion.
#[test]
fn netns_xdp_works_as_nobody() {
    let (name, layout) = ("netns_xdp_works_as_nobody", ipv4_layout(2));
    let may_update = "maps that a process without CAP_BPF may update";
    if !skip::need_kernel(name, (5, 19), may_update) {
        return;
    }
    let Some(testbed) = testbed(name, &layout) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let child = Child::start_in(b, "child_serves_xdp_as_nobody");
    assert_eq!(child.line(), "open");
    let to = |ip: &str| SocketAddr::new(ip.parse().unwrap(), PORT);
    let (at, home) = (b.ip4(0).to_string(), a.ip4(0).to_string());
    let mut pings = 0;
    let mut ping = |from: &str, at: &str, times: u64| {
        let client = client(a, from.parse().unwrap(), to(at));
        (0..times).for_each(|_| client.ping());
        pings += times;
    };
    ping(&home, &at, 10);
    assert_eq!(child.line(), "nobody");
    ping(&home, &at, 1000);
    // A peer that did not exist then, and one behind a new route.
    a.add_address(0, "10.77.0.50".parse().unwrap()).unwrap();
    a.ip_batch(&format!("address add 192.0.2.1/32 dev {}\n", a.device(0))).unwrap();
    b.ip_batch(&format!("route add 192.0.2.1/32 via 10.77.0.50 dev {}\n", b.device(0))).unwrap();
    ping("10.77.0.50", &at, 1000);
    ping("192.0.2.1", &at, 1000);
    b.set_link(0, false).unwrap();
    b.set_link(0, true).unwrap();
    a.wait_for_carrier(0).unwrap();
    b.wait_for_carrier(0).unwrap();
    ping(&home, &at, 500);
    let by_xdp = 10 + 3000;
    b.add_address(0, ADDED_ADDR.parse().unwrap()).unwrap();
    wait_for(
        "the line `followed`",
        || {
            ping(&home, ADDED_ADDR, 1);
            child.line_within(Duration::from_millis(1))
        },
        |line| line.as_deref() == Some("followed"),
    );
    b.ip_batch(&format!("link delete dev {}\n", b.device(0))).unwrap();
    assert_eq!(child.line(), "gone");
    testbed.recreate_link(0, &layout).unwrap();
    ping(&home, &at, 100);
    assert_eq!(child.line(), "warned");
    ping(&home, &at, 100);
    assert_eq!(programs(b), "");
    let child = child.release();
    let told = child.line();
    child.finish();
    let (delivered, past) = told.split_once(' ').unwrap();
    assert_eq!(delivered.parse(), Ok(pings));
    assert!(past.parse::<u64>().unwrap() >= by_xdp, "{told} of {pings}");
}
