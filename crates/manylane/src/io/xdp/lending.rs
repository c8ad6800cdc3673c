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

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use manylane_sys::hops::{self, Hop, Hops, Pair};
use manylane_sys::lend::{self, Fds, Message, Terms};
use manylane_sys::measure::Watch;
use manylane_sys::shared::Shared;
use manylane_sys::xsk::{Borrowed, LentQueue, MEMBERS};
use manylane_sys::{barrier, device as sys, sock};

use super::device::{Attach, Device, Number};
use super::gate::Gate;
use super::plane::{FRAME, HEADROOM};
use super::route::{Reader, Routes};
use crate::config::SOURCES;
use crate::error::{Error, ErrorKind, Result};

/// Between two looks while something is sent, and while nothing is.
const BUSY: Duration = Duration::from_millis(5);
const IDLE: Duration = Duration::from_millis(50);
/// Nothing was sent for so long: idle.
const QUIET: Duration = Duration::from_millis(200);
/// A next hop that nobody used for so long is forgotten, and a question is not answered any more.
const KEPT: Duration = Duration::from_secs(60);
/// A source address that the kernel chose is asked for again.
const SOURCE_KEPT: Duration = Duration::from_secs(2);
/// What changes without a word is looked at: a device's address, the addresses of wildcards.
const TURN: Duration = Duration::from_secs(2);
/// Messages that are told of at once.
const MOST: usize = 32;

const CHANNEL: u64 = 0;
const ENOSPC: i32 = 28;
const ENODEV: i32 = 19;
const EPROTO: i32 = 71;

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
    last_token: u64,
    hops: Shared<Hops>,
    hops_file: OwnedFd,
    peers: HashMap<[IpAddr; 2], Peer>,
    turn: usize,
    gate: Gate,
    rings: LentRings,
}

/// How full the receive ring of a queue is that was lent, and what that cost so far.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LentRing {
    /// The program's socket.
    pub socket: SocketAddr,
    /// The device.
    pub device: String,
    /// The queue of it.
    pub queue: u32,
    /// Frames that wait for the program, and for how many there is room.
    pub waiting: u32,
    /// Entries of the ring.
    pub entries: u32,
    /// Frames that found no room.
    pub dropped: u64,
}

/// The receive rings that are lent, as they were a moment ago (50 ms at most).
#[derive(Clone, Debug, Default)]
pub struct LentRings(Arc<Mutex<Vec<LentRing>>>);

impl LentRings {
    /// All of them.
    #[must_use]
    pub fn look(&self) -> Vec<LentRing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, rings: impl Iterator<Item = LentRing>) {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        there.clear();
        there.extend(rings);
    }
}

struct LentDevice {
    device: Arc<Device>,
    /// Those that were opened, with the number of loans that have each.
    queues: Vec<Option<(LentQueue, u32)>>,
}

/// What one socket of a program has.
struct Loan {
    token: u64,
    end: OwnedFd,
    addr: SocketAddr,
    only_v6: bool,
    is_open: bool,
    /// Its number on each device that it has queues of.
    numbers: Vec<(u32, Number)>,
    members: Vec<Member>,
}

struct Member {
    terms: Terms,
    xsk: OwnedFd,
    view: Borrowed,
    /// What it had sent when this was looked at last.
    sent: u32,
}

/// A peer that lanes send to.
struct Peer {
    pair: Pair,
    known: Option<Hop>,
    used: Instant,
    /// The address that the kernel would send from, and when it said so.
    source: Option<(IpAddr, Instant)>,
}

impl std::fmt::Debug for Lender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lender").field("devices", &self.devices()).finish_non_exhaustive()
    }
}

impl Lender {
    /// Attaches the XDP program to the devices named, or to all that are up, have an address, and take one. No frame is
    /// taken yet. With it comes the end of the channel that programs ask on: the descriptor that they are to inherit.
    ///
    /// # Errors
    /// If a device that was named cannot be used, or none can: [`ErrorKind::Permission`] without the privileges.
    pub fn open(names: Option<&[String]>) -> Result<(Self, OwnedFd)> {
        let routes = Routes::start()?;
        let devices = attach(&routes, names)?;
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
            last_token: CHANNEL,
            hops,
            hops_file,
            peers: HashMap::new(),
            turn: 0,
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
            }
        }
        Ok(())
    }

    /// A program asks for queues.
    fn hear_program(&mut self) {
        let mut fds = Fds::default();
        let message = Message::receive(self.channel.as_fd(), &mut fds);
        if matches!(message, Ok(None)) {
            // All programs have closed it: nobody asks any more.
            _ = self.watch.remove(&self.channel);
        }
        let mut fds = fds.into_iter().flatten();
        let (Ok(Some(Message::Ask)), Some(end), Some(socket)) = (message, fds.next(), fds.next()) else {
            return;
        };
        // Who asks waits with a bound, and takes no answer for a refusal.
        _ = match self.lend(&end, &UdpSocket::from(socket)) {
            Ok(loan) => self.hand_over(&end, loan),
            Err(err) => Message::Refused(err.raw_os_error().unwrap_or(EPROTO)).send(end.as_fd(), &[]),
        };
    }

    /// What a socket can be lent.
    fn lend(&mut self, end: &OwnedFd, socket: &UdpSocket) -> io::Result<Loan> {
        let about = sock::about(socket.as_fd())?;
        let addr = socket.local_addr()?;
        if !about.is_udp || addr.port() == 0 || about.namespace != self.namespace {
            return Err(io::Error::from_raw_os_error(ENODEV));
        }
        let mut loan = Loan {
            token: CHANNEL,
            end: end.try_clone()?,
            addr,
            only_v6: about.only_v6,
            is_open: false,
            numbers: Vec::new(),
            members: Vec::new(),
        };
        let all = self.routes.local_addresses();
        let wanted = addr.ip().to_canonical();
        let mut reached = false;
        for lent in &mut self.devices {
            // A wildcard is reached over each of them, an address over those that have it.
            let index = lent.device.index;
            if !wanted.is_unspecified() && !all.iter().any(|(at, ip)| (*at, *ip) == (index, wanted)) {
                continue;
            }
            reached = true;
            let Ok(number) = lent.device.register(&[]) else { continue };
            if let Err(err) = self.gate.join(&lent.device, number) {
                log::warn!("{} is not lent: {}", lent.device.name, err.chain());
                lent.device.unregister(number);
                continue;
            }
            let before = loan.members.len();
            for queue in 0..lent.device.queues() {
                if loan.members.len() == lend::QUEUES {
                    break;
                }
                match lent.member(queue, number) {
                    Ok(Some(member)) => loan.members.push(member),
                    Ok(None) => {}
                    Err(why) => log::warn!("{} queue {queue} is not lent: {why}", lent.device.name),
                }
            }
            if loan.members.len() == before {
                self.gate.leave(&lent.device, number);
                lent.device.unregister(number);
            } else {
                loan.numbers.push((index, number));
            }
        }
        if loan.members.is_empty() {
            return Err(io::Error::from_raw_os_error(if reached { ENOSPC } else { ENODEV }));
        }
        Ok(loan)
    }

    /// Gives the program what it needs.
    fn hand_over(&mut self, end: &OwnedFd, mut loan: Loan) -> io::Result<()> {
        let give = |lender: &Self| {
            Message::Done(loan.members.len() as u32).send(end.as_fd(), &[lender.hops_file.as_fd()])?;
            for member in &loan.members {
                let Some((queue, _)) = lender.queue(&member.terms) else { continue };
                Message::Queue(member.terms).send(end.as_fd(), &[member.xsk.as_fd(), queue.file()])?;
            }
            Ok(())
        };
        self.last_token += 1;
        loan.token = self.last_token;
        let given = give(self).and_then(|()| self.watch.add(&loan.end, loan.token));
        if given.is_err() {
            self.end(loan);
        } else {
            log::debug!("{} queues are lent to {}", loan.members.len(), loan.addr);
            self.loans.push(loan);
        }
        given
    }

    fn queue(&self, terms: &Terms) -> Option<&(LentQueue, u32)> {
        let lent = self.devices.iter().find(|lent| lent.device.index == terms.ifindex)?;
        lent.queues.get(terms.queue as usize)?.as_ref()
    }

    /// Who has a loan says something, or is gone.
    fn hear_holder(&mut self, token: u64) {
        let Some(at) = self.loans.iter().position(|loan| loan.token == token) else { return };
        let message = Message::receive(self.loans[at].end.as_fd(), &mut Fds::default());
        let answer = match message {
            Ok(Some(Message::Open)) => {
                self.loans[at].is_open = true;
                self.lead(&self.loans[at]).map_err(|err| {
                    log::warn!("{} is not led to its queues: {}", self.loans[at].addr, err.chain());
                    self.loans[at].is_open = false;
                })
            }
            Ok(Some(Message::Close)) => {
                self.loans[at].is_open = false;
                let led = self.lead(&self.loans[at]).map_err(|_| ());
                // What is between the program on the device and a ring arrives there before the answer.
                barrier::settle();
                led
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            _ => {
                let loan = self.loans.swap_remove(at);
                _ = self.watch.remove(&loan.end);
                self.end(loan);
                return;
            }
        };
        let answer = answer.map_or(Message::Refused(EPROTO), |()| Message::Done(0));
        _ = answer.send(self.loans[at].end.as_fd(), &[]);
    }

    /// Makes the addresses of a loan lead to it, or none if it is closed.
    fn lead(&self, loan: &Loan) -> Result<()> {
        let all: Vec<IpAddr> = self.routes.local_addresses().into_iter().map(|(_, ip)| ip).collect();
        let bound = loan.addr.ip();
        let takes = |ip: &IpAddr| match bound {
            _ if !loan.is_open || is_link_local(*ip) => false,
            _ if !bound.is_unspecified() => *ip == bound.to_canonical(),
            IpAddr::V4(_) => ip.is_ipv4(),
            IpAddr::V6(_) => ip.is_ipv6() || !loan.only_v6,
        };
        let addresses: Vec<IpAddr> = all.iter().copied().filter(takes).collect();
        for (index, number) in &loan.numbers {
            if let Some(lent) = self.devices.iter().find(|lent| lent.device.index == *index) {
                lent.device.bind(*number, loan.addr.port(), &addresses, &all)?;
            }
        }
        Ok(())
    }

    /// Takes a loan back: the port first, then the queues with what is in them.
    fn end(&mut self, loan: Loan) {
        for (index, number) in &loan.numbers {
            if let Some(lent) = self.devices.iter().find(|lent| lent.device.index == *index) {
                for member in loan.members.iter().filter(|member| member.terms.ifindex == *index) {
                    lent.device.unsteer(*number, member.terms.queue);
                }
                lent.device.unlead(*number);
                self.gate.leave(&lent.device, *number);
                lent.device.unregister(*number);
            }
        }
        barrier::settle();
        for Member { terms, view, .. } in loan.members {
            let lent = self.devices.iter_mut().find(|lent| lent.device.index == terms.ifindex);
            let queue = lent.and_then(|lent| lent.queues.get_mut(terms.queue as usize)?.as_mut());
            if let Some((_, members)) = queue {
                LentQueue::take_back(&view, u64::from(std::process::id()) << 32 | 1);
                *members = members.saturating_sub(1);
            }
        }
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

    /// Notes how full the rings are, for whoever asks.
    fn look_at_rings(&self) {
        let ring = |loan: &Loan, member: &Member| {
            let lent = self.devices.iter().find(|lent| lent.device.index == member.terms.ifindex)?;
            Some(LentRing {
                socket: loan.addr,
                device: lent.device.name.clone(),
                queue: member.terms.queue,
                waiting: member.view.waiting(),
                entries: member.terms.ring,
                dropped: member.view.statistics().map_or(0, |seen| seen.rx_ring_full + seen.rx_dropped),
            })
        };
        let of = |loan| move |member| ring(loan, member);
        self.rings.replace(self.loans.iter().flat_map(|loan| loan.members.iter().filter_map(of(loan))));
    }

    /// Enters what lanes ask for, and what has changed of it.
    fn keep_hops(&mut self) {
        let now = Instant::now();
        let Self { hops, peers, reader, turn, .. } = self;
        reader.refresh();
        hops.questions(|pair| {
            if peers.len() < hops::PLACES {
                let fresh = Peer { pair, known: None, used: now, source: None };
                peers.entry([pair.local(), pair.peer()]).or_insert(fresh).used = now;
            }
        });
        peers.retain(|[local, remote], peer| {
            if hops.was_used(&peer.pair) {
                peer.used = now;
            }
            let hop = if now.duration_since(peer.used) > KEPT {
                None
            } else {
                peer.source(*local, *remote, now).and_then(|source| {
                    let next = reader.next_hop(source, *remote)?;
                    let (source_mac, mac) = (next.source_mac, next.mac);
                    Some(Hop { source, ifindex: next.ifindex, mtu: next.mtu, source_mac, mac })
                })
            };
            match (&hop, &peer.known) {
                (Some(found), known) if known.as_ref() != Some(found) => {
                    *turn = turn.wrapping_add(1);
                    // One that had to go is asked for again by its next datagram.
                    _ = hops.put(&peer.pair, found, *turn);
                }
                (None, Some(_)) => hops.forget(&peer.pair),
                _ => {}
            }
            peer.known = hop;
            now.duration_since(peer.used) <= KEPT
        });
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

impl LentDevice {
    /// A socket in a queue, for one more loan; none if it has as many as it can have.
    fn member(&mut self, queue: u32, number: Number) -> Result<Option<Member>> {
        let index = queue as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, || None);
        }
        let name = &self.device.name;
        let failed = |err: manylane_sys::xsk::OpenError| {
            Error::system(format!("{name} queue {queue}: {}", err.step), err.source)
        };
        if self.queues[index].is_none() {
            let open = LentQueue::open(self.device.index, queue, self.device.is_virtual_pair);
            self.queues[index] = Some((open.map_err(failed)?, 0));
        }
        let Some((lent, members)) = self.queues[index].as_mut().filter(|(_, members)| *members < MEMBERS)
        else {
            return Ok(None);
        };
        let (terms, xsk) = lent.lend().map_err(failed)?;
        let mapped = |err| Error::system(format!("{name} queue {queue}: mapping its rings"), err);
        let copy = xsk.try_clone().map_err(mapped)?;
        let view = Borrowed::open(terms, copy, lent.file()).map_err(mapped)?;
        self.device.steer(number, queue, xsk.as_fd())?;
        *members += 1;
        let sent = view.progress();
        Ok(Some(Member { terms, xsk, view, sent }))
    }
}

impl Peer {
    /// The address to send from: the socket's own, or the kernel's choice.
    fn source(&mut self, local: IpAddr, remote: IpAddr, now: Instant) -> Option<IpAddr> {
        if !local.is_unspecified() {
            return Some(local);
        }
        if let Some((source, _)) = self.source.filter(|(_, at)| now.duration_since(*at) < SOURCE_KEPT) {
            return Some(source);
        }
        // No datagram is sent: a socket that is connected has chosen.
        let chosen = UdpSocket::bind((local, 0)).and_then(|socket| {
            socket.connect((remote, 9))?;
            socket.local_addr()
        });
        self.source = chosen.ok().map(|addr| (addr.ip(), now));
        self.source.map(|(source, _)| source)
    }
}

/// The devices, with the program on them.
fn attach(routes: &Routes, names: Option<&[String]>) -> Result<Vec<LentDevice>> {
    let longest = FRAME - HEADROOM;
    let open = |index| Device::open(index, Attach::Native, longest, SOURCES, true);
    let mut devices = Vec::new();
    if let Some(names) = names {
        for name in names {
            let index = manylane_sys::netns::device_index(name)
                .map_err(|err| Error::with(ErrorKind::Config, format!("there is no device {name}"), err))?;
            devices.push(LentDevice { device: open(index)?, queues: Vec::new() });
        }
        return Ok(devices);
    }
    let mut all: Vec<u32> = routes.local_addresses().into_iter().map(|(index, _)| index).collect();
    all.sort_unstable();
    all.dedup();
    let mut why = None;
    for index in all {
        let is_up = sys::name(index)
            .and_then(|name| sys::mac(&name).map(|_| name))
            .and_then(|name| sys::is_up(&name))
            .unwrap_or(false);
        // Loopback has no address of Ethernet's that means anything.
        let is_loopback = sys::name(index).is_ok_and(|name| name == "lo");
        if !is_up || is_loopback {
            continue;
        }
        match open(index) {
            Ok(device) => devices.push(LentDevice { device, queues: Vec::new() }),
            Err(err) => {
                log::info!("engine xdp: left out: {}", err.chain());
                why = Some(err);
            }
        }
    }
    if devices.is_empty() {
        let message = "no Ethernet device is up and has an address: engine xdp has no queues to lend";
        return Err(why.unwrap_or_else(|| Error::new(ErrorKind::Unsupported, message)));
    }
    Ok(devices)
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if Ipv6Addr::is_unicast_link_local(&ip))
}
