//! Readiness of many sockets: epoll.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

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
    /// An epoll that reports at most `events_max` sockets at a time.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptor left.
    pub fn new(events_max: usize) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, events: vec![libc::epoll_event { events: 0, u64: 0 }; events_max.max(1)] })
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
        let events_max = self.events.len() as libc::c_int;
        let time = libc::timespec {
            tv_sec: timeout.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
        };
        // rustix waits for whole milliseconds, unless the timeout is longer than an int has.
        // SAFETY: the kernel writes at most `events_max` events into the vector, which has that
        // many; it reads `time`, which lives across the call; a null signal mask leaves the mask
        // alone.
        let ready = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                self.events.as_mut_ptr(),
                events_max,
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
        // loop. Not by rustix, whose events have another type than those above.
        let millis = timeout.as_nanos().div_ceil(1_000_000).min(60_000) as libc::c_int;
        // SAFETY: as above.
        let ready = crate::check(unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), self.events.as_mut_ptr(), events_max, millis)
        })?;
        Ok(ready as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn epoll_reports_the_readable_socket() {
        let sockets: Vec<UdpSocket> = (0..3).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let mut watch = Epoll::new(8).unwrap();
        for (token, socket) in sockets.iter().enumerate() {
            watch.add(socket, token as u64).unwrap();
        }
        assert_eq!(watch.wait(Duration::ZERO).unwrap().count(), 0);
        sockets[0].send_to(b"x", sockets[2].local_addr().unwrap()).unwrap();
        assert_eq!(watch.wait(Duration::from_secs(120)).unwrap().collect::<Vec<_>>(), [2]);
    }
}
