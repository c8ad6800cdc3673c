//! Waits of tests.

use std::fmt::Debug;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait of a test.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Polls before a wait fails, because a machine may stand still.
const POLLS_MIN: u32 = 100;

/// Returns when all datagrams that the calling CPU has sent over loopback have been queued or
/// dropped: the kernel may do the receive side a moment later, but in order on each CPU. For a
/// thread that is pinned.
///
/// # Panics
/// After two minutes.
#[expect(clippy::expect_used, reason = "a test fails by it")]
pub fn fence_loopback() {
    let fence = UdpSocket::bind("127.0.0.1:0").expect("a port on loopback");
    fence.set_read_timeout(Some(WAIT_TIMEOUT)).expect("a timeout");
    fence.send_to(b"fence", fence.local_addr().expect("its address")).expect("sent over loopback");
    // A thread that was stopped for a while gets EINTR.
    while let Err(err) = fence.recv(&mut [0; 8]) {
        assert!(err.kind() == ErrorKind::Interrupted, "a datagram over loopback: {err}");
    }
}

/// Polls until `is_done` accepts the result, which it returns. After two minutes the test fails
/// with `what` and the last result: let `poll` return the counters that tell why.
#[track_caller]
pub fn wait_for<T: Debug>(what: &str, poll: impl FnMut() -> T, is_done: impl Fn(&T) -> bool) -> T {
    wait_for_at_most(WAIT_TIMEOUT, what, poll, is_done)
}

/// [`wait_for`] with another timeout.
#[track_caller]
pub fn wait_for_at_most<T: Debug>(
    timeout: Duration,
    what: &str,
    mut poll: impl FnMut() -> T,
    is_done: impl Fn(&T) -> bool,
) -> T {
    let start = Instant::now();
    let mut polls = 0_u32;
    loop {
        let last = poll();
        if is_done(&last) {
            return last;
        }
        polls = polls.saturating_add(1);
        assert!(polls < POLLS_MIN || start.elapsed() < timeout, "waited in vain for {what}: {last:#?}");
        thread::sleep(Duration::from_millis(1));
    }
}
