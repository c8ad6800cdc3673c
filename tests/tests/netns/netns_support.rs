//! What the tests over a testbed share: sockets of a host, and waiting for counters.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use manylane::{Builder, Handle, Socket};
use manylane_testbed::Host;
use manylane_tests::{Client, LaneDriver, Serving, TEST_TIMEOUT};

/// A receive buffer that holds all that these tests send at once: what does not arrive was not
/// delayed.
pub(crate) const RECV_BUFFER: usize = 64 << 20;

/// Opens a socket at `ip` of `host`, with the options that `change` sets.
pub(crate) fn open(host: &Host, ip: IpAddr, change: impl FnOnce(&mut Builder) + Send) -> Socket {
    host.run(move || {
        let mut builder = Builder::new((ip, 0)).unwrap();
        change(builder.recv_buffer(RECV_BUFFER));
        builder.open().unwrap()
    })
}

/// The lanes of `socket` by hand, where lanes to come are of `host` too.
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

/// Takes what comes and answers nothing: the senders of live frames have no socket, and an answer
/// would only make an ICMP message that the device counts too.
pub(crate) fn sink(host: &Host, socket: Socket) -> Serving {
    host.run(|| Serving::start(socket, |_, _| {}))
}

/// A client at `ip` of `host`.
pub(crate) fn client(host: &Host, ip: IpAddr, server: std::net::SocketAddr) -> Client {
    host.run(|| Client::between((ip, 0).into(), server))
}

/// Waits until `done`; if it does not come to that, says what the counters are.
pub(crate) fn wait_until(done: impl FnMut() -> bool, handle: &Handle) {
    assert!(wait_within(TEST_TIMEOUT, done), "{:#?}", handle.counters());
}

/// Waits until `done`, for at most `patience`; whether it came to that.
pub(crate) fn wait_within(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if start.elapsed() > patience {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}
