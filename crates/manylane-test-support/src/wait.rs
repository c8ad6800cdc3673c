//! Waits of tests.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait of a test.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Polls before a wait fails, because a machine may stand still.
const POLLS_MIN: u32 = 100;

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
