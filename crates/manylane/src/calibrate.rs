//! Which engine takes datagrams for less here: what [`Engine::Auto`] goes by.
//!
//! A short race, over loopback in the network namespace of the calling thread, once per process and
//! size of batch:
//!
//! ```text
//! lap:  fill a queue ─► CPU clock ─► engine mmsg empties it ─► CPU clock     (which engine goes first: in turn)
//!       fill a queue ─► CPU clock ─► engine uring empties it ─► CPU clock
//! ```
//!
//! `mmsg` works everywhere and cannot run dry, so it is in the right unless `uring` is clearly
//! better: by [`MARGIN_PERCENT`] in the median, and in three laps of four. What stands in the way
//! of a race decides for `mmsg`, too.
//!
//! It is run by a thread of its own, which then ends ([`uring::run_in_thread`]).

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use manylane_sys::cpu;
use manylane_sys::mmsg::{RecvOptions, RecvRing, Wait};
use manylane_sys::send_burst::SendBurst;
use manylane_sys::uring::{UringOptions, UringRecv};

use crate::config::Engine;
use crate::io::uring;

/// Datagrams of a lap, for each engine: what fits the receive buffer that a socket has without
/// asking for more.
const DATAGRAMS_PER_SAMPLE: usize = 128;
/// Their payload, and the room for it.
const PAYLOAD_SIZE: usize = 64;
/// Laps, of which the first one warms up.
const SAMPLES_MAX: usize = 17;
/// Laps without which nothing is decided.
const SAMPLES_MIN: usize = 6;
/// How long a race takes at most, but for a lap that has begun.
const CALIBRATION_TIMEOUT: Duration = Duration::from_millis(20);
/// By how many hundredths `uring` has to cost less.
const MARGIN_PERCENT: u64 = 10;
/// Receives in a row that find nothing after which the rest is lost.
const EMPTY_RECVS_MAX: u32 = 100;

/// The kernel's engine that [`Engine::Auto`] takes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineChoice {
    /// [`Engine::Mmsg`] or [`Engine::Uring`].
    pub engine: Engine,
    /// Messages that a call takes at most.
    pub batch: usize,
    /// Nanoseconds of CPU that taking a datagram costs by `mmsg` and by `uring`, medians; none
    /// without a race.
    pub cost_ns: Option<(u64, u64)>,
    /// Why.
    pub reason: String,
}

/// What a datagram has cost in one lap, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) mmsg: u64,
    pub(crate) uring: u64,
}

/// Which of the engines on kernel sockets [`Engine::Auto`] takes for batches of so many messages.
/// The first call for a size of batch measures, in 20 ms at most as a rule, and uses no more than
/// loopback; later ones give the same answer.
#[must_use]
pub fn choose_engine(batch: usize) -> EngineChoice {
    static CHOSEN: Mutex<Vec<EngineChoice>> = Mutex::new(Vec::new());
    // Who comes meanwhile waits for the answer instead of disturbing the race.
    let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = chosen.iter().find(|choice| choice.batch == batch) {
        return known.clone();
    }
    let choice = match calibrate(batch) {
        Ok(laps) => decide(batch, &laps),
        Err(why) => EngineChoice { engine: Engine::Mmsg, batch, cost_ns: None, reason: why },
    };
    chosen.push(choice.clone());
    choice
}

/// Decides by what was measured.
pub(crate) fn decide(batch: usize, laps: &[Sample]) -> EngineChoice {
    let choice = |engine, cost_ns, why| EngineChoice { engine, batch, cost_ns, reason: why };
    if laps.len() < SAMPLES_MIN {
        let why = format!("the machine is too busy to compare engines: {} of {SAMPLES_MIN} laps", laps.len());
        return choice(Engine::Mmsg, None, why);
    }
    let median = |of: fn(&Sample) -> u64| {
        let mut costs: Vec<u64> = laps.iter().map(of).collect();
        costs.sort_unstable();
        costs[costs.len() / 2]
    };
    let (mmsg, uring) = (median(|lap| lap.mmsg), median(|lap| lap.uring));
    let won = laps.iter().filter(|lap| lap.uring < lap.mmsg).count();
    let is_clear = uring * 100 <= mmsg * (100 - MARGIN_PERCENT) && won * 4 >= laps.len() * 3;
    let engine = if is_clear { Engine::Uring } else { Engine::Mmsg };
    let why = format!(
        "a datagram over loopback, {batch} a call: mmsg {mmsg} ns, uring {uring} ns, less in {won} of {} laps; it takes {MARGIN_PERCENT} %",
        laps.len()
    );
    choice(engine, Some((mmsg, uring)), why)
}

/// Runs the race, or says what is in its way.
fn calibrate(batch: usize) -> Result<Vec<Sample>, String> {
    let cannot = |err: io::Error| format!("engines cannot be compared: {err}");
    if let Some(why) = seccomp_reason(&fs::read_to_string("/proc/thread-self/status").unwrap_or_default()) {
        return Err(why.into());
    }
    uring::probe()
        .and_then(|()| uring::run_in_thread(move || Ok(collect_samples(batch))))
        .map_err(|err| err.chain())?
        .map_err(cannot)
}

/// Why io_uring is not even tried by a thread of which the kernel says `status`: filters of system
/// calls may refuse, or kill, and there is no asking.
fn seccomp_reason(status: &str) -> Option<&'static str> {
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    match mode.map(str::trim) {
        Some("0") => None,
        Some(_) => Some("a filter of system calls (seccomp) is in force, which may forbid io_uring"),
        None => Some("whether system calls are filtered (seccomp) is not told: is /proc mounted?"),
    }
}

fn collect_samples(batch: usize) -> io::Result<Vec<Sample>> {
    let start = Instant::now();
    let (room, batch) = (2048, batch.min(DATAGRAMS_PER_SAMPLE));
    let mut mmsg = Runner::new()?;
    let mut headers = RecvRing::new(RecvOptions { batch, buffer: room, control: false })?;
    let mut by_mmsg = |socket: &UdpSocket| headers.recv(socket.as_fd(), Wait::Never);
    let mut uring = Runner::new()?;
    let buffers = batch + uring::MULTISHOT_BATCH_MAX;
    let options = UringOptions { batch, buffer: room, buffers, control: false, sqarray: false };
    let mut ring = UringRecv::new(options)?;
    let mut by_uring = |socket: &UdpSocket| ring.recv(socket.as_fd(), None);
    let mut laps = Vec::with_capacity(SAMPLES_MAX);
    for number in 0..SAMPLES_MAX {
        if start.elapsed() >= CALIBRATION_TIMEOUT {
            break;
        }
        let first = if number % 2 == 0 { Some(mmsg.drain(&mut by_mmsg)?) } else { None };
        let second = uring.drain(&mut by_uring)?;
        let first = match first {
            Some(first) => first,
            None => mmsg.drain(&mut by_mmsg)?,
        };
        // Where datagrams are lost, nothing is learned.
        if let (Some(mmsg), Some(uring)) = (first, second)
            && number > 0
        {
            laps.push(Sample { mmsg, uring });
        }
    }
    Ok(laps)
}

/// A socket, and who fills its queue.
struct Runner {
    socket: UdpSocket,
    sender: UdpSocket,
    send_burst: SendBurst,
}

impl Runner {
    fn new() -> io::Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        sender.connect(socket.local_addr()?)?;
        Ok(Self {
            socket,
            sender,
            send_burst: SendBurst::new(&[0; PAYLOAD_SIZE], DATAGRAMS_PER_SAMPLE, false),
        })
    }

    /// Fills the queue and empties it: what a datagram has cost; none if some were lost.
    fn drain(
        &mut self,
        receive: &mut impl FnMut(&UdpSocket) -> io::Result<usize>,
    ) -> io::Result<Option<u64>> {
        let sent = self.send_burst.send(self.sender.as_fd(), DATAGRAMS_PER_SAMPLE)?;
        let (mut got, mut in_vain) = (0, 0);
        let before = cpu::thread_cpu_time();
        while got < sent && in_vain < EMPTY_RECVS_MAX {
            let some = receive(&self.socket)?;
            got += some;
            in_vain = if some == 0 { in_vain + 1 } else { 0 };
        }
        let spent = cpu::thread_cpu_time().saturating_sub(before);
        Ok((got == DATAGRAMS_PER_SAMPLE).then(|| spent.as_nanos() as u64 / DATAGRAMS_PER_SAMPLE as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(costs: &[(u64, u64)]) -> Vec<Sample> {
        costs.iter().map(|&(mmsg, uring)| Sample { mmsg, uring }).collect()
    }

    #[test]
    fn uring_has_to_be_clearly_better() {
        let decided = |costs: &[(u64, u64)]| decide(1, &samples(costs)).engine;
        assert_eq!(decided(&[(1000, 700); 8]), Engine::Uring);
        assert_eq!(decided(&[(1000, 900); 8]), Engine::Uring);
        assert_eq!(decided(&[(1000, 901); 8]), Engine::Mmsg);
        assert_eq!(decided(&[(700, 1000); 8]), Engine::Mmsg);
        // In the median, but not often enough.
        let mixed = [[(1000, 700); 5].as_slice(), &[(600, 700); 3]].concat();
        assert_eq!(decided(&mixed), Engine::Mmsg);
        let often = [[(1000, 700); 6].as_slice(), &[(600, 700); 2]].concat();
        assert_eq!(decided(&often), Engine::Uring);
        // Often, but by too little.
        let little = [[(1000, 950); 7].as_slice(), &[(1000, 100); 1]].concat();
        assert_eq!(decided(&little), Engine::Mmsg);
    }

    #[test]
    fn few_laps_decide_nothing() {
        let choice = decide(64, &samples(&[(1000, 100); SAMPLES_MIN - 1]));
        assert_eq!((choice.engine, choice.cost_ns), (Engine::Mmsg, None));
        assert!(choice.reason.contains("too busy"), "{}", choice.reason);
        assert_eq!(decide(64, &samples(&[(1000, 100); SAMPLES_MIN])).engine, Engine::Uring);
        assert_eq!(decide(64, &[]).engine, Engine::Mmsg);
    }

    #[test]
    fn what_was_measured_is_said() {
        let choice = decide(16, &samples(&[(800, 600); 8]));
        assert_eq!((choice.batch, choice.cost_ns), (16, Some((800, 600))));
        for said in ["16 a call", "mmsg 800 ns", "uring 600 ns", "8 of 8 laps", "10 %"] {
            assert!(choice.reason.contains(said), "{said}: {}", choice.reason);
        }
    }

    #[test]
    fn under_a_filter_nothing_is_tried() {
        assert_eq!(seccomp_reason("Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n"), None);
        assert!(seccomp_reason("Name:\tx\nSeccomp:\t2\n").unwrap().contains("seccomp"));
        assert!(seccomp_reason("").unwrap().contains("/proc"));
    }

    #[test]
    fn a_race_gives_numbers_or_a_reason_and_is_held_once() {
        let choice = choose_engine(3);
        assert!(!choice.reason.is_empty());
        // Measured again, no number would be the same.
        assert_eq!(choose_engine(3), choice);
        assert_eq!(choose_engine(5).batch, 5);
        if let Ok(laps) = collect_samples(3) {
            assert!(
                laps.len() < SAMPLES_MAX && laps.iter().all(|lap| lap.mmsg > 0 && lap.uring > 0),
                "{laps:?}"
            );
        }
    }
}
