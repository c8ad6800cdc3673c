//! A timer as a descriptor, for an [`Epoll`](crate::epoll::Epoll): timerfd_create(2), Linux 2.6.25.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use rustix::time::{timerfd_create, timerfd_settime};

/// A timer, readable from when it expires until it is started again or stopped.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer that is stopped.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?))
    }

    /// Makes it expire once, `after` from now.
    pub fn start(&self, after: Duration) {
        // Zero would stop it.
        self.set(after.max(Duration::from_nanos(1)));
    }

    /// Stops it, if it runs or has expired.
    pub fn stop(&self) {
        self.set(Duration::ZERO);
    }

    fn set(&self, after: Duration) {
        let [seconds, nanos] = [after.as_secs() as i64, after.subsec_nanos().into()];
        let value = Timespec { tv_sec: seconds, tv_nsec: nanos };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // It fails for invalid arguments only.
        _ = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epoll::Epoll;

    const LONG: Duration = Duration::from_secs(60);

    fn expired(epoll: &mut Epoll, timeout: Duration) -> Vec<u64> {
        epoll.wait(timeout).unwrap().collect()
    }

    #[test]
    fn it_is_readable_from_when_it_expires_until_it_is_set_again() {
        let (timer, mut epoll) = (Timer::new().unwrap(), Epoll::new(8).unwrap());
        epoll.add(&timer, 7).unwrap();
        assert!(expired(&mut epoll, Duration::ZERO).is_empty(), "stopped");
        timer.start(Duration::ZERO);
        assert_eq!(expired(&mut epoll, LONG), [7]);
        assert_eq!(expired(&mut epoll, LONG), [7], "still");
        timer.start(LONG);
        assert!(expired(&mut epoll, Duration::ZERO).is_empty(), "running");
        timer.start(Duration::from_micros(100));
        assert_eq!(expired(&mut epoll, LONG), [7]);
        timer.stop();
        assert!(expired(&mut epoll, Duration::ZERO).is_empty(), "stopped");
    }
}
