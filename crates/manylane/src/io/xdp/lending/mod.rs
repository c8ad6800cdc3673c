//! Queues lent to programs that know nothing of them (`manylane run --engine xdp`): this process has the privileges, the
//! programs have the datagrams.
//!
//! | stage | who | when it is full or missing |
//! |---|---|---|
//! | devices | [`Lender::open`]: the program on each, before anything is started | an error that names what to change |
//! | a program connects ([`callers`]) | anybody may; who is heard says the kernel | the oldest that says nothing goes |
//! | it asks ([`Message::Ask`](manylane_sys::lend::Message::Ask)) | the kernel says where its socket is bound, and that it is alone there | refused: no device has the address, another process has the queues, or two sockets have |
//! | the queues ([`devices`]) | opened for each process anew (`manylane_sys::xsk::LentQueue`); a socket of its own in each for each loan | left out: its frames are the kernel's |
//! | the port ([`loan`]) | in the XDP programs from [`Message::Open`](manylane_sys::lend::Message::Open) to [`Message::Close`](manylane_sys::lend::Message::Close) | refused: the kernel goes on serving it |
//! | next hops ([`peers`]) | asked of the kernel (`route`), entered where the lanes of that loan read them (`manylane_sys::hops`) | not entered: lanes send by their kernel socket |
//! | the end of a loan | its last holder closed it, or was killed; its socket is closed; what was said makes no sense | the port goes first, then what is in the rings |
//!
//! All is done by one thread, which waits for messages, and looks every few milliseconds at what has no message: questions
//! for next hops, and frames that a lane has put into a ring without coming back to tell the kernel. When this process ends,
//! however it ends, its programs are off the devices, and every frame is the kernel's.

mod callers;
mod devices;
mod loan;
mod peers;
mod rings;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use manylane_sys::lend::Ticket;
use manylane_sys::measure::Watch;
use manylane_sys::{bound, sock};

use self::callers::Visitor;
use self::devices::{LentDevice, attach};
use self::loan::Loan;
pub use self::rings::{LentRing, LentRings};
use super::gate::Gate;
use super::route::{Reader, Routes};
use crate::error::{Error, Result};

/// Between two looks while something is sent, and while nothing is.
const BUSY: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(50);
/// Nothing was sent for so long: idle.
const QUIET: Duration = Duration::from_millis(200);
/// What changes without a word is looked at: a device's address, the addresses of wildcards.
const TURN: Duration = Duration::from_secs(2);
/// Messages that are told of at once.
const MOST: usize = 32;

/// Between two looks whether the sockets of loans are there.
const SOCKETS: Duration = Duration::from_millis(250);

/// Of the listener, where ends have theirs.
const LISTENER: u64 = 0;

/// Lends the queues of devices.
pub struct Lender {
    devices: Vec<LentDevice>,
    routes: Arc<Routes>,
    reader: Reader,
    /// Addresses may have changed.
    has_changed: Arc<AtomicBool>,
    /// The network namespace that all of this is about.
    namespace: u64,
    ticket: Ticket,
    listener: OwnedFd,
    watch: Watch,
    visitors: Vec<Visitor>,
    /// The user beside root that may have queues.
    other_user: Option<u32>,
    loans: Vec<Loan>,
    last_token: u64,
    last_number: u16,
    gate: Gate,
    rings: LentRings,
}

impl std::fmt::Debug for Lender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lender").field("devices", &self.devices()).finish_non_exhaustive()
    }
}

impl Lender {
    /// Attaches the XDP program to the devices named, or to all that are up, have an address that is not link-local, and take
    /// one; of those, veth devices are left out, those on which `rp_filter` keeps senders from posing as others, and those
    /// that `spare` gives a reason for. No frame is taken yet.
    ///
    /// # Errors
    /// If a device that was named cannot be used, or none can:
    /// [`ErrorKind::Permission`](crate::ErrorKind::Permission) without the privileges.
    pub fn open(names: Option<&[String]>, spare: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let routes = Routes::start()?;
        let devices = attach(&routes, names, &spare)?;
        let failed = |err| Error::system("what programs are lent queues by", err);
        let ticket = Ticket::new().map_err(failed)?;
        let listener = ticket.listen().map_err(failed)?;
        let probe = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?;
        let namespace = sock::about(probe.as_fd())
            .map_err(|err| Error::system("asking for a network namespace (Linux 5.14)", err))?
            .namespace;
        bound::to_port(1)
            .map_err(|err| Error::system("asking for UDP sockets (CONFIG_INET_UDP_DIAG)", err))?;
        let watch = Watch::new(MOST).map_err(failed)?;
        watch.add(&listener, LISTENER).map_err(failed)?;
        let has_changed = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&has_changed);
        routes.on_change(Box::new(move |_| tell.store(true, Ordering::Release)));
        let reader = routes.reader();
        Ok(Self {
            devices,
            routes,
            reader,
            has_changed,
            namespace,
            ticket,
            listener,
            watch,
            visitors: Vec::new(),
            other_user: None,
            loans: Vec::new(),
            last_token: LISTENER,
            last_number: 0,
            gate: Gate::default(),
            rings: LentRings::default(),
        })
    }

    /// By what programs ask: for the environment of those that are started, in
    /// [`VARIABLE`](manylane_sys::lend::VARIABLE). Who reads it, and is of a user who may, is lent queues.
    #[must_use]
    pub fn ticket(&self) -> String {
        self.ticket.to_string()
    }

    /// Names of the devices in use.
    #[must_use]
    pub fn devices(&self) -> Vec<&str> {
        self.devices.iter().map(|lent| lent.device.name.as_str()).collect()
    }

    /// By what limits and prefixes are set, of all sockets that have queues or will; before it [runs](Self::run), and while
    /// it does.
    #[must_use]
    pub fn gate(&self) -> Gate {
        self.gate.clone()
    }

    /// By what the rings are looked at while it [runs](Self::run).
    #[must_use]
    pub fn rings(&self) -> LentRings {
        self.rings.clone()
    }

    /// Lends until `stop` is set, or nothing can be waited for any more.
    ///
    /// # Errors
    /// What waiting reports. The queues go with this value.
    pub fn run(mut self, stop: &AtomicBool) -> io::Result<()> {
        let mut sent = Instant::now();
        let (mut look, mut looked) = (sent, sent);
        while !stop.load(Ordering::Acquire) {
            let tick = if sent.elapsed() < QUIET { BUSY } else { IDLE };
            let mut ready: Vec<u64> = self.watch.wait(tick)?.collect();
            // What is given back is there for who asks.
            ready.sort_unstable();
            // One thing of each, so that nobody keeps the others waiting.
            for token in ready {
                if token == LISTENER {
                    self.let_in();
                } else if let Some(at) = self.visitor(token) {
                    self.hear_visitor(at);
                } else if let Some(at) = self.loans.iter().position(|loan| loan.caller.token == token) {
                    self.hear_holder(at);
                }
            }
            self.answer();
            if self.push_on() {
                sent = Instant::now();
            }
            self.look_at_rings();
            self.reader.refresh();
            for loan in &mut self.loans {
                loan.hops.keep(&mut self.reader);
            }
            self.take_back();
            if looked.elapsed() >= SOCKETS {
                looked = Instant::now();
                self.look_at_sockets();
            }
            let changed = self.has_changed.swap(false, Ordering::AcqRel);
            if changed || look.elapsed() >= TURN {
                look = Instant::now();
                self.follow();
            }
        }
        Ok(())
    }

    /// Tells the kernel of frames that nobody has told it of; whether something was sent since the last time.
    fn push_on(&mut self) -> bool {
        let mut any = false;
        for member in self.loans.iter_mut().flat_map(|loan| &mut loan.members) {
            let sent = member.view.progress();
            any |= std::mem::replace(&mut member.sent, sent) != sent;
            if member.view.has_unsent() {
                member.view.kick();
            }
        }
        any
    }

    /// What has changed on the machine changes here, too.
    fn follow(&mut self) {
        for lent in &self.devices {
            _ = lent.device.refresh();
        }
        self.lead_all();
    }
}
