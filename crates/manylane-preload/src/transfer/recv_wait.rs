//! The waits of a receive: in slices, on a lane's queues and its kernel socket, until the program's
//! own timeout ends or a signal handler interrupts the call.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::{EAGAIN, EINTR, MSG_DONTWAIT, MSG_PEEK, POLLIN, POLLRDHUP, c_int, pollfd, timespec};
use manylane_ipc::lease::QUEUES_MAX;

use crate::base::real::{self, fail_with_errno};
use crate::base::settings::WAIT_SLICE;
use crate::base::signals;
use crate::batching::rx_coalesce;
use crate::shared::sock::WAITS_ON;
use crate::shared::thread;
use crate::transfer::recv_call::{RecvCall, options};
use crate::xdp::queues;

impl<Op: Fn(c_int, c_int) -> isize> RecvCall<'_, Op> {
    /// Reads the options again, as the kernel does when it restarts the call after a handler.
    pub(crate) fn read_options(&self) {
        let (nonblock, timeout_us) = options(self.shared, self.flags);
        self.nonblock.set(nonblock);
        self.timeout_us.set(timeout_us);
    }

    /// True if the call has no timeout, and the program's own receive would have none.
    pub(crate) fn is_endless(&self) -> bool {
        self.timeout_us.get() == 0 && options(self.shared, self.flags) == (false, 0)
    }

    /// Returns when the program's own timeout ends, which counts from the first wait of a call.
    pub(crate) fn start_timeout(&self) -> Option<Instant> {
        let timeout = self.timeout_us.get();
        if timeout > 0 && self.until.get().is_none() {
            self.until.set(Some(Instant::now() + Duration::from_micros(timeout)));
        }
        self.until.get()
    }

    /// Delays before a wait on the caller's own lane, if that pays: see `rx_coalesce.rs`. Returns
    /// the result if the call is over.
    pub(crate) fn rx_coalesce(&self, own: usize) -> Option<isize> {
        let left = self.start_timeout().map(|until| until.saturating_duration_since(Instant::now()));
        let lane = self.sock.fd_of(own, self.fd);
        let sleep = |time: timespec| {
            self.member.state.store(WAITS_ON + own as u32, Ordering::Release);
            let ended = real::ppoll_none(time, self.signals.wait_mask(None));
            self.defer_signals();
            self.member.finish_wait();
            self.member.beat();
            (ended < 0 && !self.should_wait_again()).then_some(-1)
        };
        rx_coalesce::before_sleep(lane, left, || self.try_lane(own), sleep)
    }

    /// Waits on a lane for at most a slice. None: the program would still be waiting.
    pub(crate) fn wait_on(&self, lane: usize) -> Option<isize> {
        self.start_timeout();
        self.member.state.store(WAITS_ON + lane as u32, Ordering::Release);
        let with_queues = queues::is_open(self.shared);
        let answer = if with_queues {
            self.wait_for_queues(lane)
        } else if self.signals.is_active() || !self.kernel_waits(lane) {
            self.wait_by_poll(lane)
        } else {
            (self.op)(self.sock.fd_of(lane, self.fd), 0)
        };
        if answer < 0 {
            self.defer_signals();
        }
        self.member.finish_wait();
        self.member.beat();
        if answer >= 0 {
            if self.flags & MSG_PEEK != 0 && !with_queues {
                thread::set_peeked(self.sock, lane);
            }
            return Some(answer);
        }
        if self.should_wait_again() { None } else { Some(answer) }
    }

    /// A wait ended without a datagram: true if the program would still be waiting.
    pub(crate) fn should_wait_again(&self) -> bool {
        let timeout = self.timeout_us.get();
        match real::errno() {
            EAGAIN if timeout == 0 => true,
            EAGAIN => self.start_timeout().is_none_or(|until| Instant::now() < until),
            // With a timeout of its own, the kernel would not have restarted the call.
            EINTR => timeout == 0 && signals::should_restart(),
            _ => false,
        }
    }

    /// Waits for a lane's queues and its kernel socket, for at most a slice. Returns what a
    /// receive on the socket would have returned.
    fn wait_for_queues(&self, lane: usize) -> isize {
        if let Some(answer) = self.try_lane(lane) {
            return answer;
        }
        queues::flush();
        let mut fds = [pollfd { fd: -1, events: POLLIN, revents: 0 }; 1 + QUEUES_MAX];
        fds[0].fd = self.sock.fd_of(lane, self.fd);
        let count = queues::append_pollfds(self.sock, self.shared, 1 << lane, &mut fds, 1);
        let mask = self.signals.wait_mask(None);
        if real::is_interrupted(real::ppoll(&mut fds[..count], WAIT_SLICE, mask)) {
            return -1;
        }
        self.try_lane(lane).unwrap_or_else(|| fail_with_errno(EAGAIN))
    }

    /// True if a receive on a lane's kernel socket waits for a slice. On the program's own socket
    /// it does so only while the kernel has our bound, and the program has not made it non-blocking
    /// meanwhile.
    fn kernel_waits(&self, lane: usize) -> bool {
        let is_bounded = || self.shared.bounded.load(Ordering::Acquire) != 0;
        lane != 0 || is_bounded() && self.shared.nonblock.load(Ordering::Relaxed) == 0
    }

    /// Waits for a lane's kernel socket, for at most a slice, with the program's signal mask.
    /// Returns what a receive would have returned.
    fn wait_by_poll(&self, lane: usize) -> isize {
        let fd = self.sock.fd_of(lane, self.fd);
        let mut at = [pollfd { fd, events: POLLIN | POLLRDHUP, revents: 0 }];
        let mask = self.signals.wait_mask(None);
        if real::is_interrupted(real::ppoll(&mut at, WAIT_SLICE, mask)) {
            return -1;
        }
        if at[0].revents & POLLRDHUP != 0 {
            // It is shut down: a receive that may wait returns 0 at once, and another one EAGAIN.
            self.read_options();
            return (self.op)(fd, 0);
        }
        // A datagram that poll reports may be gone: then the result is EAGAIN.
        (self.op)(fd, MSG_DONTWAIT)
    }

    /// After a slice: defers signals, if handlers interrupt the call, so that one interrupts it at
    /// any time.
    pub(crate) fn defer_signals(&self) {
        if !signals::should_restart() || self.timeout_us.get() != 0 {
            self.signals.defer();
        }
    }
}
