//! Queues lent to programs that know nothing of them (`manylane run --engine xdp`): this process has the privileges, the
//! programs have the datagrams.
//!
//! | stage | who | when it is full or missing |
//! |---|---|---|
//! | devices | [`Lender::open`]: the program on each, before anything is started | an error that names what to change |
//! | a program asks ([`Message::Ask`]) | its socket says where it is bound, not the program | refused: no device has the address, or two sockets have the queues already |
//! | the queues | opened when the first one asks (`manylane_sys::xsk::LentQueue`); a socket of its own in each for each loan | left out: its frames are the kernel's |
//! | the port | in the XDP programs from [`Message::Open`] to [`Message::Close`] | refused: the kernel goes on serving it |
//! | next hops | asked of the kernel (`route`), entered where lanes read them (`manylane_sys::hops`) | not entered: lanes send by their kernel socket |
//! | the end of a loan | its last holder closed it, or was killed | the port goes first, then what is in the rings |
//!
//! All is done by one thread, which waits for messages, and looks every few milliseconds at what has no message: questions
//! for next hops, and frames that a lane has put into a ring without coming back to tell the kernel. When this process ends,
//! however it ends, its programs are off the devices, and every frame is the kernel's.

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

use manylane_sys::hops::Hops;
use manylane_sys::measure::Watch;
use manylane_sys::shared::Shared;
use manylane_sys::{lend, sock};

use self::devices::{LentDevice, attach};
use self::loan::{Loan, Member};
use self::peers::Peers;
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

/// What the watch calls the channel; loans are called by their numbers.
const CHANNEL: u64 = 0;

/// Lends the queues of devices.
pub struct Lender {
    devices: Vec<LentDevice>,
    routes: Arc<Routes>,
    reader: Reader,
    /// Addresses may have changed.
    has_changed: Arc<AtomicBool>,
    /// The network namespace that all of this is about.
    namespace: u64,
    channel: OwnedFd,
    watch: Watch,
    loans: Vec<Loan>,
    last_number: u16,
    /// Of loans that have ended: what is still to be taken back.
    left: Vec<Member>,
    hops: Shared<Hops>,
    hops_file: OwnedFd,
    peers: Peers,
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
    /// that `spare` gives a reason for. No frame is taken yet. With it comes the end of the channel that programs ask on: the
    /// descriptor that they are to inherit.
    ///
    /// # Errors
    /// If a device that was named cannot be used, or none can: [`ErrorKind::Permission`](crate::ErrorKind::Permission) without the privileges.
    pub fn open(names: Option<&[String]>, spare: impl Fn(&str) -> Option<String>) -> Result<(Self, OwnedFd)> {
        let routes = Routes::start()?;
        let devices = attach(&routes, names, &spare)?;
        let failed = |err| Error::system("what programs are lent queues by", err);
        let (channel, theirs) = lend::pair(Duration::from_secs(1)).map_err(failed)?;
        let theirs = lend::inheritable(theirs.as_fd()).map_err(failed)?;
        let probe = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?;
        let namespace = sock::about(probe.as_fd())
            .map_err(|err| Error::system("asking for a network namespace (Linux 5.14)", err))?
            .namespace;
        let watch = Watch::new(MOST).map_err(failed)?;
        watch.add(&channel, CHANNEL).map_err(failed)?;
        let (hops, hops_file) = Shared::<Hops>::create(c"manylane-hops").map_err(failed)?;
        hops.seed(std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0));
        hops.beat();
        let has_changed = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&has_changed);
        routes.on_change(Box::new(move |_| tell.store(true, Ordering::Release)));
        let reader = routes.reader();
        let lender = Self {
            devices,
            routes,
            reader,
            has_changed,
            namespace,
            channel,
            watch,
            loans: Vec::new(),
            last_number: 0,
            left: Vec::new(),
            hops,
            hops_file,
            peers: Peers::default(),
            gate: Gate::default(),
            rings: LentRings::default(),
        };
        Ok((lender, theirs))
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
        let mut look = Instant::now();
        while !stop.load(Ordering::Acquire) {
            self.hops.beat();
            let tick = if sent.elapsed() < QUIET { BUSY } else { IDLE };
            let mut ready: Vec<u64> = self.watch.wait(tick)?.collect();
            // What is given back is there for who asks.
            ready.sort_unstable_by_key(|token| *token == CHANNEL);
            for token in ready {
                if token == CHANNEL { self.hear_program() } else { self.hear_holder(token) }
            }
            if self.push_on() {
                sent = Instant::now();
            }
            self.look_at_rings();
            self.keep_hops();
            let changed = self.has_changed.swap(false, Ordering::AcqRel);
            if changed || look.elapsed() >= TURN {
                look = Instant::now();
                self.follow();
                self.take_back();
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
        for loan in self.loans.iter().filter(|loan| loan.is_open) {
            if let Err(err) = self.lead(loan) {
                log::warn!("the machine has changed, and XDP could not follow: {}", err.chain());
            }
        }
    }
}
