//! One loan: asked for, handed over, opened and closed, taken back.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};

use manylane_sys::lend::{self, Fds, Message, Terms};
use manylane_sys::xsk::{Borrowed, LentQueue};
use manylane_sys::{barrier, sock};

use super::Lender;
use crate::error::Result;
use crate::io::xdp::checks;
use crate::io::xdp::device::Number;

const ENOSPC: i32 = 28;
const ENODEV: i32 = 19;
const EPROTO: i32 = 71;

/// What one socket of a program has.
pub(super) struct Loan {
    /// Its number; also what the watch calls its end.
    pub(super) number: u16,
    pub(super) end: OwnedFd,
    pub(super) addr: SocketAddr,
    pub(super) only_v6: bool,
    pub(super) is_open: bool,
    /// Its number on each device that it has queues of.
    pub(super) numbers: Vec<(u32, Number)>,
    pub(super) members: Vec<Member>,
}

pub(super) struct Member {
    pub(super) terms: Terms,
    pub(super) xsk: OwnedFd,
    pub(super) view: Borrowed,
    /// What it had sent when this was looked at last.
    pub(super) sent: u32,
}

impl Lender {
    /// A program asks for queues.
    pub(super) fn hear_program(&mut self) {
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
            number: self.free_number(),
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
                match lent.member(queue, number, loan.number) {
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
    fn hand_over(&mut self, end: &OwnedFd, loan: Loan) -> io::Result<()> {
        let give = |lender: &Self| {
            Message::Done(loan.members.len() as u32).send(end.as_fd(), &[lender.hops_file.as_fd()])?;
            for member in &loan.members {
                let Some((queue, _)) = lender.queue(&member.terms) else { continue };
                Message::Queue(member.terms).send(end.as_fd(), &[member.xsk.as_fd(), queue.file()])?;
            }
            Ok(())
        };
        let given = give(self).and_then(|()| self.watch.add(&loan.end, loan.number.into()));
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
    pub(super) fn hear_holder(&mut self, token: u64) {
        let Some(at) = self.loans.iter().position(|loan| u64::from(loan.number) == token) else { return };
        let message = Message::receive(self.loans[at].end.as_fd(), &mut Fds::default());
        let answer = match message {
            Ok(Some(Message::Open)) => {
                let led = self.lead(&self.loans[at]);
                self.loans[at].is_open = led.is_ok();
                if let Err(err) = &led {
                    log::warn!("{} is not led to its queues: {}", self.loans[at].addr, err.chain());
                    self.unlead(&self.loans[at]);
                }
                led.map_or(Message::Refused(EPROTO), |()| Message::Done(0))
            }
            Ok(Some(Message::Close)) => {
                self.loans[at].is_open = false;
                self.unlead(&self.loans[at]);
                // What is between the program on the device and a ring arrives there before the answer.
                barrier::settle();
                Message::Done(0)
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => return,
            _ => {
                let loan = self.loans.swap_remove(at);
                _ = self.watch.remove(&loan.end);
                self.end(loan);
                return;
            }
        };
        _ = answer.send(self.loans[at].end.as_fd(), &[]);
    }

    /// Makes the addresses of a loan lead to it. After an error some do.
    pub(super) fn lead(&self, loan: &Loan) -> Result<()> {
        let locals = self.routes.locals();
        let not_from = checks::not_from(&locals);
        for (index, number) in &loan.numbers {
            if let Some(lent) = self.devices.iter().find(|lent| lent.device.index == *index) {
                let addresses = checks::led(loan.addr.ip(), loan.only_v6, *index, &locals);
                lent.device.bind(*number, loan.addr.port(), &addresses, &not_from)?;
            }
        }
        Ok(())
    }

    /// Lets no address lead to a loan any more.
    fn unlead(&self, loan: &Loan) {
        for (index, number) in &loan.numbers {
            if let Some(lent) = self.devices.iter().find(|lent| lent.device.index == *index) {
                lent.device.unlead(*number);
            }
        }
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
        self.left.extend(loan.members);
        self.take_back();
    }

    /// Takes back what loans that have ended left in rings; where another loan keeps the lock for long, later.
    pub(super) fn take_back(&mut self) {
        let Self { devices, loans, left, .. } = self;
        let has_ended = |number| loans.iter().all(|loan| loan.number != number);
        left.retain(|Member { terms, view, .. }| {
            let lent = devices.iter_mut().find(|lent| lent.device.index == terms.ifindex);
            let queue = lent.and_then(|lent| lent.queues.get_mut(terms.queue as usize)?.as_mut());
            let Some((_, members)) = queue else { return false };
            let is_back = LentQueue::take_back(view, has_ended);
            *members = members.saturating_sub(u32::from(is_back));
            !is_back
        });
    }

    /// A number that no loan has, and none that something is to be taken back of.
    fn free_number(&mut self) -> u16 {
        loop {
            self.last_number = self.last_number.checked_add(1).unwrap_or(1);
            let number = self.last_number;
            if self.loans.iter().all(|loan| loan.number != number)
                && self.left.iter().all(|member| member.terms.loan != number)
            {
                return number;
            }
        }
    }
}
