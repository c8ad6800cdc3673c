//! Common code of the tests over a testbed: sockets of a host, and waiting for counters.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use manylane::{Builder, Handle, Socket};
use manylane_test_support::wait_for;
use manylane_testbed::Host;
use manylane_tests::{Client, LaneDriver, Serving};

/// A receive buffer for all datagrams that these tests send at once, so that missing ones are
/// really lost.
pub(crate) const RECV_BUFFER_BYTES: usize = 64 << 20;

/// Opens a socket at `ip` of `host`, with the options set by `change`.
pub(crate) fn open(host: &Host, ip: IpAddr, change: impl FnOnce(&mut Builder) + Send) -> Socket {
    host.run(move || {
        let mut builder = Builder::new((ip, 0)).unwrap();
        change(builder.recv_buffer(RECV_BUFFER_BYTES));
        open_when_released(&mut builder)
    })
}

/// Openings, of 30 s each, in which the kernel has to release the queues of the socket before: on a
/// machine that is busy, a grace period and the RTNL lock take this long now and then.
const OPENINGS_MAX: u32 = 4;

/// Opens a socket; again as long as the kernel has not released queues of an earlier one.
pub(crate) fn open_when_released(builder: &mut Builder) -> Socket {
    for _ in 1..OPENINGS_MAX {
        match builder.open() {
            Err(err) if err.to_string().contains("the kernel has not released ") => {}
            opened => return opened.unwrap(),
        }
    }
    builder.open().unwrap()
}

/// The lanes of `socket` by hand; added lanes are in `host`, too.
pub(crate) fn lane_driver(host: &Host, socket: Socket) -> LaneDriver {
    host.run(|| LaneDriver::new(socket))
}

/// Serves echo in `host`.
pub(crate) fn echo(host: &Host, socket: Socket) -> Serving {
    host.run(|| {
        Serving::start(socket, |batch, out| {
            for datagram in batch {
                out.reply_borrowed(&datagram, datagram.payload());
            }
        })
    })
}

/// Receives without replies: senders of live frames have no socket, and a reply would only cause
/// an ICMP message that the device counts, too.
pub(crate) fn sink(host: &Host, socket: Socket) -> Serving {
    host.run(|| Serving::start(socket, |_, _| {}))
}

/// A client at `ip` of `host`.
pub(crate) fn client(host: &Host, ip: IpAddr, server: std::net::SocketAddr) -> Client {
    host.run(|| Client::between((ip, 0).into(), server))
}

/// Waits until `done`; a timeout prints `what` and the counters.
#[track_caller]
pub(crate) fn wait_until(what: &str, handle: &Handle, mut done: impl FnMut() -> bool) {
    wait_for(what, || (done(), handle.counters()), |(done, _)| *done);
}

/// Waits until `count` datagrams have arrived, whatever became of them.
#[track_caller]
pub(crate) fn wait_for_arrived(handle: &Handle, count: u64) {
    let what = format!("{count} arrived datagrams");
    wait_for(&what, || handle.counters(), |counters| counters.total().arrived() >= count);
}

/// Waits until `done`, for at most `timeout`. Returns false after a timeout.
pub(crate) fn wait_within(timeout: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > timeout {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}
