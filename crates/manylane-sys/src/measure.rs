//! Measurement support: CPU time of other threads, precise sleeps, readiness of many sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::addr::SockAddr;

/// CPU time used by thread `tid` of this process.
///
/// Unlike `/proc/self/task/TID/schedstat`, which is up to a tick behind, the thread's clock
/// includes what runs at this moment.
///
/// # Errors
/// `EINVAL` if there is no such thread in this process.
#[cfg(any(test, feature = "bench"))]
pub fn thread_cpu_time_of(tid: i32) -> io::Result<Duration> {
    /// `CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED`: the clock id that `pthread_getcpuclockid(3)`
    /// builds, part of the kernel's ABI since 2.6.12.
    const PER_THREAD_SCHED: libc::clockid_t = 4 | 2;
    let clock = (!tid << 3) | PER_THREAD_SCHED;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes `time`, which lives across the call, and checks the clock's number.
    crate::check(unsafe { libc::clock_gettime(clock, &raw mut time) })?;
    Ok(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32))
}

/// Receives one datagram by `recvfrom(2)` and waits for it. Returns its length, and its source in
/// `peer`.
///
/// Unlike the standard library's `recv_from`, it works on a socket that was shut down for reading:
/// it returns 0 and leaves `peer` without a family.
///
/// # Errors
/// Those of `recvfrom(2)`.
#[inline]
pub fn recv_from(fd: BorrowedFd<'_>, buffer: &mut [u8], peer: &mut SockAddr) -> io::Result<usize> {
    let mut len = SockAddr::CAPACITY as libc::socklen_t;
    // SAFETY: the kernel writes at most `buffer.len()` bytes into the buffer and at most `len`
    // bytes, the capacity of a SockAddr, into `peer`; all of them live across the call.
    let got = unsafe {
        libc::recvfrom(
            fd.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            0,
            std::ptr::from_mut(peer).cast(),
            &raw mut len,
        )
    };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got as usize) }
}

/// Sends one datagram to `peer` by `sendto(2)`, waiting for room in the send buffer.
///
/// As the standard library's `send_to`, for an address in the form that [`recv_from`] returns.
///
/// # Errors
/// Those of `sendto(2)`.
#[inline]
pub fn send_to(fd: BorrowedFd<'_>, payload: &[u8], peer: &SockAddr) -> io::Result<usize> {
    let address = peer.as_bytes();
    // SAFETY: the kernel reads `payload.len()` bytes of the payload and `address.len()` bytes of
    // the address; both live across the call.
    let sent = unsafe {
        libc::sendto(
            fd.as_raw_fd(),
            payload.as_ptr().cast(),
            payload.len(),
            libc::MSG_NOSIGNAL,
            address.as_ptr().cast(),
            address.len() as libc::socklen_t,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

/// Reduces the calling thread's timer slack from 50 µs to 1 µs.
pub fn reduce_timer_slack() {
    // SAFETY: PR_SET_TIMERSLACK takes a plain number and touches no memory of ours.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_usize) };
}

/// Readiness of many sockets (epoll).
#[derive(Debug)]
pub struct Epoll {
    epoll: OwnedFd,
    events: Vec<libc::epoll_event>,
}

/// Adds sockets to an [`Epoll`] that another thread waits on, and removes them, even during a
/// wait.
#[derive(Debug)]
pub struct EpollHandle(OwnedFd);

impl EpollHandle {
    /// As [`Epoll::add`].
    ///
    /// # Errors
    /// As there.
    pub fn add(&self, socket: &impl AsFd, token: u64) -> io::Result<()> {
        add(&self.0, socket, token)
    }

    /// As [`Epoll::remove`].
    ///
    /// # Errors
    /// As there.
    pub fn remove(&self, socket: &impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.0, socket)?)
    }
}

fn add(epoll: &OwnedFd, socket: &impl AsFd, token: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, socket, EventData::new_u64(token), EventFlags::IN)?)
}

impl AsFd for Epoll {
    /// Readable while a watched socket is: an epoll can be nested.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Epoll {
    /// An epoll that reports at most `most` sockets at a time.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptor left.
    pub fn new(most: usize) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, events: vec![libc::epoll_event { events: 0, u64: 0 }; most.max(1)] })
    }

    /// Watches `socket` and reports it as `token`. Closing the socket removes it.
    ///
    /// # Errors
    /// `EEXIST` if it is watched already, `ENOSPC` at the limit `fs.epoll.max_user_watches`.
    pub fn add(&self, socket: &impl AsFd, token: u64) -> io::Result<()> {
        add(&self.epoll, socket, token)
    }

    /// Reports `socket`, which is watched as `token`, when there is room to send instead of when
    /// it is readable.
    ///
    /// # Errors
    /// `ENOENT` if it is not watched.
    pub fn set_writable_interest(&self, socket: &impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, socket, EventData::new_u64(token), EventFlags::OUT)?)
    }

    /// Stops watching `socket`. Closing it does the same, unless it has other descriptors.
    ///
    /// # Errors
    /// `ENOENT` if it is not watched.
    pub fn remove(&self, socket: &impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, socket)?)
    }

    /// Makes waits poll the device of the watched sockets for `time` before they sleep:
    /// `EPIOCSPARAMS`, Linux 6.9; see [`busy_poll`](crate::busy_poll).
    ///
    /// # Errors
    /// `ENOTTY` before Linux 6.9; `EPERM` for a `budget` above
    /// [`BUDGET_PACKETS`](crate::busy_poll::BUDGET_PACKETS) without CAP_NET_ADMIN.
    pub fn busy_poll(&self, time: Duration, budget: u16) -> io::Result<()> {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        crate::busy_poll::set_epoll(self.epoll.as_fd(), micros, budget)
    }

    /// A handle with which other threads add and remove sockets.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptor left.
    pub fn handle(&self) -> io::Result<EpollHandle> {
        self.epoll.try_clone().map(EpollHandle)
    }

    /// Waits for at most `timeout` and returns the tokens of the readable sockets. A signal ends
    /// the wait with none.
    ///
    /// # Errors
    /// Those of `epoll_wait(2)`.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<impl Iterator<Item = u64> + '_> {
        let ready = match self.wait_raw(timeout) {
            Ok(ready) => ready,
            Err(err) if err.kind() == io::ErrorKind::Interrupted => 0,
            Err(err) => return Err(err),
        };
        Ok(self.events[..ready].iter().map(|event| event.u64))
    }

    fn wait_raw(&mut self, timeout: Duration) -> io::Result<usize> {
        let most = self.events.len() as libc::c_int;
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
        };
        // SAFETY: the kernel writes at most `most` events into the vector, which has that many; it
        // reads `time`, which lives across the call; a null signal mask leaves the mask alone.
        let ready = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                self.events.as_mut_ptr(),
                most,
                &raw const time,
                std::ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        if ready >= 0 {
            return Ok(ready as usize);
        }
        let err = io::Error::last_os_error();
        if err.raw_os_error() != Some(libc::ENOSYS) {
            return Err(err);
        }
        // Before Linux 5.11: whole milliseconds, rounded up so that a short wait is not a busy
        // loop.
        let millis = timeout.as_nanos().div_ceil(1_000_000).min(60_000) as libc::c_int;
        // SAFETY: as above.
        let ready = crate::check(unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), self.events.as_mut_ptr(), most, millis)
        })?;
        Ok(ready as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn the_clock_of_another_thread_advances_with_its_work() {
        /// The maximum of `kernel.pid_max`.
        const PID_MAX: i32 = 1 << 22;
        let (told, tid) = std::sync::mpsc::channel();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = stop.clone();
        let worker = std::thread::spawn(move || {
            told.send(crate::cpu::thread_id()).unwrap();
            while !seen.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let tid = tid.recv().unwrap();
        let before = thread_cpu_time_of(tid).unwrap();
        while thread_cpu_time_of(tid).unwrap() < before + Duration::from_millis(1) {
            std::thread::yield_now();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        worker.join().unwrap();
        assert_eq!(thread_cpu_time_of(PID_MAX + 1).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn recv_returns_a_datagram_or_the_end() {
        let (receiver, sender) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        sender.send_to(b"hello", receiver.local_addr().unwrap()).unwrap();
        let (mut buffer, mut peer) = ([0; 16], SockAddr::EMPTY);
        assert_eq!(recv_from(receiver.as_fd(), &mut buffer, &mut peer).unwrap(), 5);
        assert_eq!(peer.to_std(), Some(sender.local_addr().unwrap()));
        assert_eq!(send_to(receiver.as_fd(), &buffer[..5], &peer).unwrap(), 5);
        let mut answer = [0; 16];
        let (len, from) = sender.recv_from(&mut answer).unwrap();
        assert_eq!((&answer[..len], from), (&b"hello"[..], receiver.local_addr().unwrap()));
        crate::sock::wake(receiver.as_fd());
        peer = SockAddr::EMPTY;
        assert_eq!(recv_from(receiver.as_fd(), &mut buffer, &mut peer).unwrap(), 0);
        assert_eq!(peer.to_std(), None);
    }

    #[test]
    fn epoll_reports_the_readable_socket() {
        let sockets: Vec<UdpSocket> = (0..3).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let mut watch = Epoll::new(8).unwrap();
        for (token, socket) in sockets.iter().enumerate() {
            watch.add(socket, token as u64).unwrap();
        }
        assert_eq!(watch.wait(Duration::ZERO).unwrap().count(), 0);
        sockets[0].send_to(b"x", sockets[2].local_addr().unwrap()).unwrap();
        assert_eq!(watch.wait(Duration::from_secs(5)).unwrap().collect::<Vec<_>>(), [2]);
    }
}
