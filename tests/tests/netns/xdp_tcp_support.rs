//! Lanes of TCP on threads inside of a host.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use manylane::tcp::{Id, TcpBuilder, TcpCounters, TcpLane, What};
use manylane_testbed::{Host, Layout, Testbed, skip};
use manylane_tests::tcp_peer::pattern;

/// Longest time after which a lane looks whether it is to end.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// Two hosts, whose kernels send frames one by one, as long as those of a wire.
pub(crate) fn tcp_testbed(name: &str, layout: &Layout) -> Option<Testbed> {
    skip::need_root(name).then(|| without_segmentation(Testbed::new(layout).unwrap()))
}

/// Makes the kernels of two hosts send so.
pub(crate) fn without_segmentation(testbed: Testbed) -> Testbed {
    for host in [0, 1] {
        testbed.host(host).set_segmentation(0, false).unwrap();
    }
    testbed
}

/// Takes the link of both hosts down for two seconds.
pub(crate) fn take_link_down(linux: &Host, host: &Host) {
    linux.set_link(0, false).unwrap();
    thread::sleep(Duration::from_secs(2));
    linux.set_link(0, true).unwrap();
    host.wait_for_carrier(0).unwrap();
}

/// Gives the device of `linux` another MAC, and tells `host`.
pub(crate) fn change_mac(linux: &Host, host: &Host) {
    const MAC: &str = "02:00:00:00:77:01";
    linux.ip_batch(&format!("link set dev {} address {MAC}", linux.device(0))).unwrap();
    let (peer, device) = (linux.ip4(0), host.device(0));
    host.ip_batch(&format!("neigh replace {peer} lladdr {MAC} dev {device} nud permanent")).unwrap();
}

/// Lanes that serve until they are stopped.
pub(crate) struct Lanes {
    end: Arc<AtomicBool>,
    threads: Vec<JoinHandle<TcpCounters>>,
}

impl Lanes {
    /// Opens the lanes in the host, and starts a thread for each.
    pub(crate) fn start(
        host: &Host,
        change: impl FnOnce(&mut TcpBuilder) + Send,
        serve: impl Fn(&mut TcpLane, &AtomicBool) + Clone + Send + 'static,
    ) -> Lanes {
        let lanes = host.run(|| {
            let mut builder = TcpBuilder::new();
            change(&mut builder);
            builder.open().unwrap()
        });
        let end = Arc::new(AtomicBool::new(false));
        let start = |mut lane: TcpLane| {
            let (end, serve) = (Arc::clone(&end), serve.clone());
            host.spawn("lane", move || {
                serve(&mut lane, &end);
                lane.counters()
            })
            .unwrap()
        };
        Lanes { threads: lanes.into_iter().map(start).collect(), end }
    }

    /// Stops them; returns the counters of each.
    pub(crate) fn stop(self) -> Vec<TcpCounters> {
        self.end.store(true, Ordering::Release);
        self.wait()
    }

    /// Waits until they have ended by themselves; returns the counters of each.
    pub(crate) fn wait(mut self) -> Vec<TcpCounters> {
        self.threads.drain(..).map(|thread| thread.join().unwrap()).collect()
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
    }
}

/// Sends back what comes.
pub(crate) fn echo(lane: &mut TcpLane, end: &AtomicBool) {
    echo_until(lane, end, |lane| lane.wait(TICK).unwrap());
}

/// The same, with another way to wait.
pub(crate) fn echo_until(lane: &mut TcpLane, end: &AtomicBool, mut wait: impl FnMut(&mut TcpLane)) {
    let mut pending: HashMap<Id, Vec<u8>> = HashMap::new();
    while !end.load(Ordering::Acquire) {
        wait(lane);
        while let Some(event) = lane.event() {
            if matches!(event.what, What::Closed(_)) {
                pending.remove(&event.id);
                continue;
            }
            let mut stream = lane.stream(event.id);
            let bytes = pending.entry(event.id).or_default();
            loop {
                let written = stream.write(bytes);
                bytes.drain(..written);
                if !bytes.is_empty() {
                    break;
                }
                let read = stream.read(|more| {
                    bytes.extend_from_slice(more);
                    more.len()
                });
                if read == 0 {
                    break;
                }
            }
            if bytes.is_empty() && stream.is_at_end() {
                pending.remove(&event.id);
                stream.close();
            }
        }
    }
}

/// Makes a connection for each of these numbers, sends a pattern of `length` bytes over each, and
/// expects it back.
pub(crate) fn ask(lane: &mut TcpLane, server: SocketAddr, connections: Range<usize>, length: usize) {
    struct Exchange {
        sent: Vec<u8>,
        written: usize,
        received: Vec<u8>,
    }
    let mut open = HashMap::new();
    for connection in connections {
        let sent = pattern(connection, length);
        let id = lane.connect(server).unwrap();
        open.insert(id, Exchange { sent, written: 0, received: Vec::new() });
    }
    while !open.is_empty() {
        lane.wait(TICK).unwrap();
        while let Some(event) = lane.event() {
            // What comes of those that were closed.
            let Some(exchange) = open.get_mut(&event.id) else { continue };
            assert!(!matches!(event.what, What::Closed(_)), "{event:?} {:#?}", lane.counters());
            let mut stream = lane.stream(event.id);
            let more = stream.write(&exchange.sent[exchange.written..]);
            exchange.written += more;
            if more > 0 && exchange.written == length {
                stream.shutdown();
            }
            let mut take = |more: &[u8]| {
                exchange.received.extend_from_slice(more);
                more.len()
            };
            while stream.read(&mut take) > 0 {}
            if stream.is_at_end() {
                assert!(exchange.received == exchange.sent, "{} of {length} bytes", exchange.received.len());
                stream.close();
                open.remove(&event.id);
            }
        }
    }
    // The last ACKs.
    lane.wait(Duration::ZERO).unwrap();
}
