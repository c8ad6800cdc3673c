//! Queues of devices on loan (engine `xdp`): asked of the launcher, opened, closed, given back. `manylane_sys::lend` has the
//! messages.
//!
//! ```text
//! NONE ─ask─► LENT ─the first receiver that comes back─► OPEN ─fall back─► DRAINING ─all empty─► CLOSED
//!   └─refused, or an option stands against it, with a reason─────────────────────────────────────► CLOSED
//! ```
//!
//! - NONE, CLOSED: the socket is what it is with engine `mmsg`.
//! - LENT: the queues are mapped, and nothing comes to them. So they are before a fork, which hands them to the child.
//! - OPEN: frames come to the queues, and each lane has some of them (`queues.rs`).
//! - DRAINING: nothing comes any more, for good, and what is there goes before anything else.
//!
//! What each process has of a loan is in memory that is never unmapped: a thread may be in it while another one closes the
//! socket. The state is in the memory that all processes share. Only who has the socket's lock changes either.

use std::ffi::c_int;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

use manylane_sys::hops::Hops;
use manylane_sys::lend::{Fds, Message, QUEUES};
use manylane_sys::shared::Shared as SharedMemory;
use manylane_sys::shim::Reason;
use manylane_sys::xsk::Borrowed;

use crate::lock::Guard;
use crate::sock::{LANED, LEARN, SINGLE, Shared, Sock};
use crate::table::{self, Entry};
use crate::{alone, hidden, hold, identity, lanes, memory, mend, mirror, open, queues, real, report, start};

pub(crate) const NONE: u32 = 0;
pub(crate) const LENT: u32 = 1;
pub(crate) const OPEN: u32 = 2;
pub(crate) const DRAINING: u32 = 3;
pub(crate) const CLOSED: u32 = 4;

/// The launcher answers within milliseconds; it may have to open devices, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(10);
/// Loans that a process has in its life: what is mapped stays so.
const LOANS: u32 = 64;

static LOANS_SO_FAR: AtomicU32 = AtomicU32::new(0);

/// A loan as this process has it.
pub(crate) struct Loan {
    /// Our end of it; -1 when it is closed.
    end: AtomicI32,
    pub(crate) queues: [Option<Borrowed>; QUEUES],
    pub(crate) hops: SharedMemory<Hops>,
    /// Where the socket is bound.
    pub(crate) local: IpAddr,
    pub(crate) port: u16,
    /// Addresses are those of IPv6.
    pub(crate) is_v6: bool,
    /// Headers of what is sent.
    pub(crate) ttl: u8,
    pub(crate) may_be_cut: bool,
}

/// Whether there is a launcher that lends.
pub(crate) fn is_wanted() -> bool {
    start::settings().is_some_and(|settings| settings.lender.is_some())
}

/// Whether a socket has no queues yet, and may get some.
#[inline]
pub(crate) fn is_due(shared: &Shared) -> bool {
    shared.loan.load(Ordering::Acquire) < OPEN && is_wanted()
}

/// A member has come back to receive: it gets queues, if there are any.
#[cold]
pub(crate) fn begin(sock: &'static Sock, shared: &Shared, fd: c_int) {
    let errno = real::errno();
    if let Some(guard) = mend::lock(sock, shared, true)
        && matches!(shared.mode(), SINGLE | LEARN | LANED)
    {
        if shared.loan.load(Ordering::Acquire) == NONE {
            take(sock, shared, fd, &guard);
        }
        if shared.loan.load(Ordering::Acquire) == LENT {
            open(sock, shared, &guard);
            hold::tell(shared, fd);
        }
    }
    real::set_errno(errno);
}

/// Before a fork: what is not there now could not be reached by both processes later.
pub(crate) fn in_advance(sock: &'static Sock, shared: &Shared, fd: c_int, guard: &Guard<'_>) {
    if is_wanted() && shared.loan.load(Ordering::Acquire) == NONE {
        take(sock, shared, fd, guard);
    }
}

fn refuse(shared: &Shared, fd: c_int, reason: Reason) {
    shared.loan.store(CLOSED, Ordering::Release);
    report::count_reason(reason, lanes::local_addr(fd));
}

/// Counts one more loan; false at the limit.
fn count_one() -> bool {
    LOANS_SO_FAR
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < LOANS).then_some(count + 1))
        .is_ok()
}

/// Asks for queues and maps them.
fn take(sock: &'static Sock, shared: &Shared, fd: c_int, _guard: &Guard<'_>) {
    if shared.forked.load(Ordering::Relaxed) != 0 {
        return refuse(shared, fd, Reason::NoQueue);
    }
    if !identity::is(sock, fd) {
        return;
    }
    // A descriptor for each queue, and one to talk about them.
    if open::room(QUEUES + 1) <= QUEUES {
        return refuse(shared, fd, Reason::Full);
    }
    if mirror::needs_kernel(fd) {
        return refuse(shared, fd, Reason::Control);
    }
    if !count_one() {
        return refuse(shared, fd, Reason::Full);
    }
    identity::note(shared);
    let asked = ask(fd);
    if asked.is_err() {
        LOANS_SO_FAR.fetch_sub(1, Ordering::Relaxed);
    }
    match asked {
        Ok(loan) => {
            let count = loan.queues.iter().flatten().count();
            let Some(loan) = settle(loan) else { return refuse(shared, fd, Reason::Full) };
            sock.set_loan(Some(loan));
            shared.queue_count.store(count as u32, Ordering::Relaxed);
            queues::spread(shared);
            shared.loan.store(LENT, Ordering::Release);
        }
        Err(err) => {
            let refused = matches!(err.raw_os_error(), Some(libc::ENODEV | libc::ENOSPC));
            refuse(shared, fd, if refused { Reason::NoQueue } else { Reason::Lender });
        }
    }
}

/// Puts a loan where it stays.
fn settle(loan: Loan) -> Option<&'static Loan> {
    let words = memory::map::<Word>(size_of::<Loan>().div_ceil(size_of::<Word>()), false)?;
    let at = words.as_ptr().cast_mut().cast::<Loan>();
    // SAFETY: the mapping is as long, aligned to a page, never unmapped, and nobody else knows of it yet. The loan has no
    // other owner afterwards.
    unsafe {
        at.write(loan);
        Some(&*at)
    }
}

#[repr(transparent)]
struct Word(std::sync::atomic::AtomicU64);

// SAFETY: an atomic.
unsafe impl memory::Atomics for Word {}

/// A descriptor where programs seldom look.
fn out_of_the_way(fd: OwnedFd) -> OwnedFd {
    let high = hidden::out_of_the_way(fd.into_raw_fd());
    // SAFETY: the descriptor that was just given up, or its copy: nobody else has it.
    unsafe { OwnedFd::from_raw_fd(high) }
}

fn ask(fd: c_int) -> std::io::Result<Loan> {
    let gone = || std::io::Error::from_raw_os_error(libc::EPIPE);
    let ticket = start::settings().and_then(|settings| settings.lender.as_ref()).ok_or_else(gone)?;
    let addr = lanes::local_addr(fd).ok_or_else(gone)?;
    let end = ticket.connect(PATIENCE)?;
    // SAFETY: it is the one that the calling thread is in a call on.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    Message::Ask(ticket.secret).send(end.as_fd(), &[socket])?;
    let mut fds = Fds::default();
    let (count, hops) = match Message::receive(end.as_fd(), &mut fds)?.ok_or_else(gone)? {
        Message::Done(count) => (count, fds[0].take().ok_or_else(gone)?),
        Message::Refused(errno) => return Err(std::io::Error::from_raw_os_error(errno)),
        _ => return Err(gone()),
    };
    let (ttl, may_be_cut) = mirror::headers(fd);
    let mut loan = Loan {
        end: AtomicI32::new(-1),
        queues: [const { None }; QUEUES],
        hops: SharedMemory::open(hops.as_fd())?,
        local: addr.ip().to_canonical(),
        port: addr.port(),
        is_v6: addr.is_ipv6(),
        ttl,
        may_be_cut,
    };
    for place in loan.queues.iter_mut().take(count as usize) {
        let mut fds = Fds::default();
        let Some(Message::Queue(terms)) = Message::receive(end.as_fd(), &mut fds)? else {
            return Err(gone());
        };
        let [Some(xsk), Some(memory), ..] = fds else { return Err(gone()) };
        *place = Some(Borrowed::open(terms, out_of_the_way(xsk), memory.as_fd())?);
    }
    *loan.end.get_mut() = out_of_the_way(end).into_raw_fd();
    loan.descriptors().for_each(|fd| _ = table::set(fd, Entry::Hidden));
    Ok(loan)
}

/// A loan that came to nothing. One that is settled is never dropped.
impl Drop for Loan {
    fn drop(&mut self) {
        // What is hidden cannot be closed, by the program or by the drops of the queues. The lender sees the end of it.
        self.descriptors().for_each(|fd| _ = table::set(fd, Entry::None));
        let end = *self.end.get_mut();
        if end >= 0 {
            crate::calls::call::close(end);
        }
    }
}

impl Loan {
    pub(crate) fn has(&self, fd: c_int) -> bool {
        self.descriptors().any(|at| at == fd)
    }

    /// All that are open for it.
    fn descriptors(&self) -> impl Iterator<Item = c_int> {
        let queues = self.queues.iter().flatten().map(|queue| queue.as_fd().as_raw_fd());
        queues.chain([self.end.load(Ordering::Relaxed)]).filter(|fd| *fd >= 0)
    }

    /// Says something to the lender, and whether it has done so.
    fn order(&self, order: Message) -> bool {
        let end = self.end.load(Ordering::Acquire);
        if end < 0 {
            return false;
        }
        // SAFETY: hidden from the program, and closed only by `give_back`, under the lock that the caller has.
        let end = unsafe { BorrowedFd::borrow_raw(end) };
        let said = order.send(end, &[]).and_then(|()| Message::receive(end, &mut Fds::default()));
        matches!(said, Ok(Some(Message::Done(_))))
    }
}

fn open(sock: &'static Sock, shared: &Shared, _guard: &Guard<'_>) {
    let Some(loan) = sock.loan() else { return };
    if !loan.order(Message::Open) {
        shared.loan.store(CLOSED, Ordering::Release);
        report::count_reason(Reason::Lender, None);
        return;
    }
    queues::spread(shared);
    // Who went straight through looks at queues from now on.
    alone::leave(sock);
    shared.loan.store(OPEN, Ordering::Release);
    queues::report_lanes(shared);
}

/// The socket is about to be plain, or to be closed: when this returns, nothing comes to the queues any more. Under the socket's lock.
pub(crate) fn close(sock: &Sock, shared: &Shared) {
    if shared.loan.load(Ordering::Acquire) != OPEN {
        return;
    }
    queues::flush();
    // A launcher that is gone has taken its programs off the devices.
    if let Some(loan) = sock.loan() {
        loan.order(Message::Close);
    }
    shared.loan.store(DRAINING, Ordering::SeqCst);
}

/// This process closes the socket: it has no part in the loan any more. When no process has, the lender takes it back.
pub(crate) fn give_back(sock: &Sock) {
    let Some(loan) = sock.loan() else { return };
    queues::flush();
    sock.set_loan(None);
    loan.descriptors().for_each(hidden::close);
    loan.end.store(-1, Ordering::Release);
}

/// Whether this process has the loan of that number.
#[cold]
pub(crate) fn is_ours(number: u16) -> bool {
    let has = |loan: &Loan| loan.queues.iter().flatten().any(|queue| queue.terms().loan == number);
    Sock::in_use().filter_map(Sock::loan).any(has)
}

/// Whether a descriptor is one of a loan's.
pub(crate) fn has(fd: c_int) -> bool {
    Sock::in_use().filter_map(Sock::loan).any(|loan| loan.has(fd))
}
