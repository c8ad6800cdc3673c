//! io_uring requests that only look up a file: measures the cost of finding a descriptor.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::abi::Sqe;
use super::bare::release_socket;
use super::setup::Ring;

/// Operation code of a no-op.
const OP_NOP: u8 = 0;
/// `nop_flags`: look up the file (Linux 6.13); the file is a registered one (same version).
const NOP_FILE: u32 = 1 << 1;
const NOP_FIXED_FILE: u32 = 1 << 2;

/// Lookup of a request's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// No file.
    None,
    /// By its descriptor, in the process's table.
    Descriptor,
    /// By its index among the ring's registered files.
    Registered,
}

/// A ring for such requests, for the thread that makes it.
pub struct LookupRing {
    ring: Ring,
    fd: i32,
    batch: u32,
}

impl Drop for LookupRing {
    fn drop(&mut self) {
        release_socket(&mut self.ring);
    }
}

impl LookupRing {
    /// Registers `file`, and allocates for `batch` requests at a time.
    ///
    /// # Errors
    /// As for [`UringRecv::new`](super::UringRecv::new).
    pub fn new(file: BorrowedFd<'_>, batch: u32) -> io::Result<Self> {
        let batch = batch.clamp(1, 1024).next_power_of_two();
        let ring = Ring::with_entries(batch, 2 * batch, false)?;
        ring.enable()?;
        ring.register_file(file)?;
        Ok(Self { ring, fd: file.as_raw_fd(), batch })
    }

    /// Submits a batch of requests by one call, and returns their number.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.13; other errors of io_uring.
    pub fn run(&mut self, how: Lookup) -> io::Result<u32> {
        let (fd, msg_flags) = match how {
            Lookup::None => (-1, 0),
            Lookup::Descriptor => (self.fd, NOP_FILE),
            Lookup::Registered => (0, NOP_FILE | NOP_FIXED_FILE),
        };
        for _ in 0..self.batch {
            self.ring.push(Sqe { opcode: OP_NOP, fd, msg_flags, user_data: u64::MAX, ..Sqe::default() });
        }
        let mut done = 0;
        let mut failed = None;
        while done < self.batch {
            self.ring.enter(None)?;
            let there = self.ring.load_cq_tail();
            while let Some(completion) = self.ring.peek(there) {
                self.ring.pop();
                done += 1;
                if completion.res < 0 {
                    failed = Some(completion.res);
                }
            }
            self.ring.release();
        }
        failed.map_or(Ok(done), |res| Err(io::Error::from_raw_os_error(-res)))
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn lookup_only_requests_complete() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut lookups = match LookupRing::new(socket.as_fd(), 8) {
            Ok(lookups) => lookups,
            Err(err) => return eprintln!("skipped: no io_uring: {err}"),
        };
        assert_eq!(lookups.run(Lookup::None).unwrap(), 8);
        for how in [Lookup::Descriptor, Lookup::Registered] {
            match lookups.run(how) {
                Ok(count) => assert_eq!(count, 8),
                Err(err) => {
                    assert_eq!(err.raw_os_error(), Some(libc::EINVAL));
                    eprintln!("skipped: {how:?} needs Linux 6.13");
                }
            }
        }
    }
}
