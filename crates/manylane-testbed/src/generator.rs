//! The fast sender: an XDP program generates the frames, and the kernel passes them to the device
//! without a socket, a route or an skb on the sending side (live frames, Linux 5.18).
//!
//! A run is one system call, in which the program itself keeps the rate: it reads the clock for
//! each frame that the kernel offers, and drops those that are not due. So a run occupies a CPU for
//! its whole duration, at any rate. SIGURG, which this program uses for nothing else, ends it.

mod frames;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use std::{io, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use aya::maps::Array;
use aya::programs::{ProgramError, TestRun as _, TestRunAttrs, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use manylane_measure::{Sent, Traffic, Until};
use manylane_sys::cpu;
use signal_hook::consts::SIGURG;

use self::frames::Template;
use crate::host::Host;
use crate::link::{DeviceCounters, device_counters};

/// Number of frames that the kernel prepares at a time before the other end of the link receives
/// them: as many as one poll takes (NAPI_POLL_WEIGHT).
const BATCH: u32 = 64;
/// Interval at which a run is checked from outside, and so the latency of a stop.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum time of frames on the link after the last one was generated, and the minimum number of
/// looks at them in it, if this thread has no CPU meanwhile.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
const DRAIN_POLLS_MIN: u32 = 100;

/// `struct ml_generator` of bpf/generator.bpf.c, in words.
type State = [u64; 10];
const LIMIT: usize = 0;
const DURATION: usize = 1;
const INTERVAL: usize = 2;
const FRAMES: usize = 3;
const FIRST_NS: usize = 4;
const LAST_NS: usize = 5;
const LATE_NS: usize = 6;
const NEXT_DUE: usize = 7;

/// `struct ml_way`: index of the device, sum of the checksum, and from `HEADER_OFFSET` on the
/// headers.
type LinkTemplate = [u8; 72];
const HEADER_OFFSET: usize = 8;
/// Maximum number of links.
const LINKS_MAX: usize = 64;

/// Constants of the program.
struct Constants {
    ways: u32,
    flows: u32,
    first_port: u16,
    ipv6: bool,
    syn: bool,
    random_source: u32,
}

impl Constants {
    /// Those of `traffic` over this number of links.
    fn of(traffic: &Traffic, links: usize) -> Constants {
        Constants {
            ways: links as u32,
            flows: traffic.flows.into(),
            first_port: 40_000.min(u16::MAX - traffic.flows.saturating_sub(1)),
            ipv6: traffic.target.is_ipv6(),
            syn: false,
            random_source: 0,
        }
    }
}

/// Sends frames from one end of a link, or of several in turn. Counts are exact only if it is the
/// only such sender on that end.
#[derive(Debug)]
pub struct LiveSender {
    host: Host,
    links: Vec<usize>,
    ebpf: Ebpf,
    /// The traffic of the first link.
    frame: Vec<u8>,
    pps: Option<f64>,
    cpu: Option<usize>,
    sender_tid: Arc<AtomicI32>,
}

impl LiveSender {
    /// Prepares to send `traffic` from `from` to `to` over `link`, which joins them. The target of
    /// the traffic is any address of `to`.
    ///
    /// # Errors
    /// Fails if eBPF cannot be loaded, or the datagram does not fit a frame of the link or a page.
    pub fn new(from: &Host, to: &Host, link: usize, traffic: &Traffic) -> Result<LiveSender> {
        Self::build(from, to, &[link], std::slice::from_ref(traffic))
    }

    /// As [`LiveSender::new`], but each frame has a random source address of 5.0.0.0/8: a flood.
    /// IPv4 only, and without UDP checksums.
    ///
    /// # Errors
    /// As [`LiveSender::new`].
    pub fn with_random_sources(from: &Host, to: &Host, link: usize, traffic: &Traffic) -> Result<LiveSender> {
        ensure!(traffic.target.is_ipv4(), "random sources need an IPv4 target");
        let source = Ipv4Addr::new(5, 0, 0, 0);
        let template = frames::datagram(from, to, link, traffic, source.into())?;
        let constants = Constants { random_source: u32::MAX >> 8, ..Constants::of(traffic, 1) };
        Self::load(from, &[link], &[template], &constants, traffic.pps)
    }

    /// A flood of SYNs over link `link` to `target`, each with a random source: an address within
    /// the first `length` bits of `sources`, a port, and a sequence number. Checksums are valid.
    ///
    /// # Errors
    /// As [`LiveSender::new`].
    pub fn syn_flood(
        from: &Host,
        to: &Host,
        link: usize,
        target: SocketAddrV4,
        (sources, length): (Ipv4Addr, u8),
        pps: Option<f64>,
    ) -> Result<LiveSender> {
        let random_source = u32::MAX.checked_shr(length.into()).unwrap_or(0);
        let source = Ipv4Addr::from_bits(sources.to_bits() & !random_source);
        let template = frames::syn(from, to, link, target, source)?;
        let traffic = Traffic::new(target.into(), 0);
        let constants = Constants { random_source, syn: true, ..Constants::of(&traffic, 1) };
        Self::load(from, &[link], &[template], &constants, pps)
    }

    /// As [`LiveSender::new`], over all of `links` in turn, so that each has the same share of the
    /// rate. Frames over a link are sent to the address that `to` has there, and to the port of
    /// the traffic.
    ///
    /// # Errors
    /// As [`LiveSender::new`]; also without links.
    pub fn over_links(from: &Host, to: &Host, links: &[usize], traffic: &Traffic) -> Result<LiveSender> {
        let target = |&link: &usize| (to.ip(link, traffic.target.is_ipv6()), traffic.target.port()).into();
        let each: Vec<Traffic> =
            links.iter().map(|link| Traffic { target: target(link), ..traffic.clone() }).collect();
        Self::build(from, to, links, &each)
    }

    /// Link n carries traffic n. They differ in their target only.
    fn build(from: &Host, to: &Host, links: &[usize], each: &[Traffic]) -> Result<LiveSender> {
        let traffic = each.first().context("traffic needs a link")?;
        ensure!(traffic.flows > 0, "traffic needs at least one flow");
        ensure!(!traffic.gso, "live frames do not support GSO messages: use sockets");
        let template = |(traffic, &link): (&Traffic, &usize)| {
            let source = from.ip(link, traffic.target.is_ipv6());
            frames::datagram(from, to, link, traffic, source)
        };
        let templates: Result<Vec<Template>> = each.iter().zip(links).map(template).collect();
        Self::load(from, links, &templates?, &Constants::of(traffic, links.len()), traffic.pps)
    }

    /// Loads the program, with a template for each link.
    fn load(
        from: &Host,
        links: &[usize],
        templates: &[Template],
        constants: &Constants,
        pps: Option<f64>,
    ) -> Result<LiveSender> {
        ensure!(links.len() <= LINKS_MAX, "live frames support at most {LINKS_MAX} links");
        let mut ebpf = EbpfLoader::new()
            .override_global("ways", &constants.ways, true)
            .override_global("flows", &constants.flows, true)
            .override_global("first_port", &constants.first_port, true)
            .override_global("ipv6", &u8::from(constants.ipv6), true)
            .override_global("syn", &u8::from(constants.syn), true)
            .override_global("random_source", &constants.random_source, true)
            .load(manylane_bpf::GENERATOR)
            .context("loading the traffic generator")?;
        let program: &mut Xdp = ebpf.program_mut("generate").context("no program generate")?.try_into()?;
        program.load().context("loading the traffic generator (needs CAP_BPF and CAP_NET_ADMIN)")?;
        let mut ways: Array<_, LinkTemplate> =
            ebpf.map_mut("generator_ways").context("no map generator_ways")?.try_into()?;
        for (index, (template, &link)) in (0..).zip(templates.iter().zip(links)) {
            let mut way: LinkTemplate = [0; size_of::<LinkTemplate>()];
            way[..4].copy_from_slice(&from.device_index(link)?.to_ne_bytes());
            way[4..6].copy_from_slice(&template.partial.to_ne_bytes());
            way[HEADER_OFFSET..HEADER_OFFSET + template.head]
                .copy_from_slice(&template.frame[..template.head]);
            ways.set(index, way, 0).context("writing the settings of the generator")?;
        }
        Ok(LiveSender {
            host: from.clone(),
            links: links.to_vec(),
            ebpf,
            frame: templates.first().map(|template| template.frame.clone()).unwrap_or_default(),
            pps,
            cpu: None,
            sender_tid: Arc::default(),
        })
    }

    /// Runs on this CPU from now on. Frames enter the queue of the link that has the number of the
    /// CPU (modulo queues), and the receiving end takes them on the same CPU.
    pub fn pin(&mut self, cpu: usize) -> &mut Self {
        self.cpu = Some(cpu);
        self
    }

    /// Id of the thread that generates the frames, and in whose context the other end receives
    /// them, as long as it runs; otherwise 0. Its CPU time is the testbed's share of the
    /// CPU.
    pub fn sender_tid(&self) -> Arc<AtomicI32> {
        Arc::clone(&self.sender_tid)
    }

    /// Changes the rate of later runs.
    pub fn set_rate(&mut self, pps: Option<f64>) -> &mut Self {
        self.pps = pps;
        self
    }

    /// Sends, and returns when all frames have entered the other end.
    ///
    /// # Errors
    /// Fails if the kernel does not run live frames, or the other end accepts none of them.
    #[allow(clippy::needless_pass_by_value, reason = "as the portable sender; an order is used once")]
    pub fn send(&mut self, until: Until) -> Result<Sent> {
        self.set_params(&until)?;
        let before = self.link_counters()?;
        self.run(&until)?;
        let state = self.state()?;
        // The time of the last frame is included, so that the rate is right also for few frames.
        let interval = if state[FRAMES] > 0 { state[INTERVAL] >> 8 } else { 0 };
        let mut sent = Sent {
            datagrams: state[FRAMES],
            rejected: 0,
            elapsed: Duration::from_nanos(
                state[LAST_NS].saturating_sub(state[FIRST_NS]).saturating_add(interval),
            ),
            late: Duration::from_nanos(state[LATE_NS]),
        };
        // The program counts the frames that it generated. The link counts those that it rejected
        // because it was full, and those that it carried. The others were sent to a link that was
        // down.
        let (settled, mut polls) = (Instant::now(), 0);
        loop {
            let now = self.link_counters()?;
            polls += 1;
            let refused = now.tx_dropped - before.tx_dropped;
            let through = now.tx_packets - before.tx_packets;
            let may_come = settled.elapsed() < DRAIN_TIMEOUT || polls < DRAIN_POLLS_MIN;
            if through + refused < sent.datagrams && may_come {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            sent.rejected = refused.max(sent.datagrams.saturating_sub(through)).min(sent.datagrams);
            sent.datagrams -= sent.rejected;
            break;
        }
        ensure!(
            sent.datagrams > 0 || sent.rejected == 0,
            "{} accepted none of {} frames: the other end must be up, with GRO or an XDP program",
            self.host.device(self.links[0]),
            sent.rejected
        );
        Ok(sent)
    }

    /// The sum of the devices' counters.
    fn link_counters(&self) -> Result<DeviceCounters> {
        self.host.run(|| {
            let mut sum = DeviceCounters::default();
            for &link in &self.links {
                let one = device_counters(self.host.device(link))?;
                sum.tx_packets += one.tx_packets;
                sum.tx_dropped += one.tx_dropped;
            }
            Ok(sum)
        })
    }

    /// Runs the program on a thread inside the host until it is done.
    fn run(&self, until: &Until) -> Result<()> {
        install_signal_handler()?;
        let (thread_id, over) = (&*self.sender_tid, AtomicBool::new(false));
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                self.host.enter();
                if let Some(cpu) = self.cpu {
                    cpu::pin(cpu).with_context(|| format!("pinning the generator to CPU {cpu}"))?;
                }
                thread_id.store(cpu::thread_id(), Ordering::Relaxed);
                self.run_program(until, &over)
            });
            let (mut began, mut failed) = (None, None);
            while !worker.is_finished() {
                thread::sleep(POLL_INTERVAL);
                // If its progress cannot be read, it has to end, too.
                let done = self.is_done(until, &mut began).unwrap_or_else(|err| {
                    failed = Some(err);
                    true
                });
                if done {
                    over.store(true, Ordering::Relaxed);
                    let tid = thread_id.load(Ordering::Relaxed);
                    // Repeated, because a signal before the system call is lost. The thread may
                    // just have ended.
                    if tid != 0 && !worker.is_finished() {
                        let _ = cpu::interrupt_thread(tid, SIGURG);
                    }
                }
            }
            thread_id.store(0, Ordering::Relaxed);
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            failed.map_or(Ok(()), Err)
        })
    }

    /// Runs the program as often as there is work; usually once.
    fn run_program(&self, until: &Until, over: &AtomicBool) -> Result<()> {
        let program: &Xdp = self.ebpf.program("generate").context("no program generate")?.try_into()?;
        loop {
            // Without a rate every offered frame is sent, so that a count ends the call by itself.
            let repeat = match until {
                Until::Count(count) | Until::CountOrStop(count, _) if self.pps.is_none() => {
                    count.saturating_sub(self.state()?[FRAMES])
                }
                _ => u64::MAX,
            };
            if repeat == 0 || over.load(Ordering::Relaxed) {
                return Ok(());
            }
            let options = TestRunOptions {
                data_in: Some(&self.frame),
                repeat: u32::try_from(repeat).unwrap_or(u32::MAX),
                attrs: TestRunAttrs::new().xdp_live_frames(BATCH),
                ..TestRunOptions::default()
            };
            match program.test_run(options) {
                Ok(_) => {}
                // Our signal, or another one, after which the run continues.
                Err(ProgramError::SyscallError(err)) if err.io_error.kind() == io::ErrorKind::Interrupted => {
                }
                Err(err) => {
                    return Err(err).context("sending live frames (Linux 5.18, CAP_BPF and CAP_NET_ADMIN)");
                }
            }
        }
    }

    /// True if the run is over; `began` is when its first frame was seen.
    fn is_done(&self, until: &Until, began: &mut Option<Instant>) -> Result<bool> {
        Ok(match until {
            Until::Count(count) => self.state()?[FRAMES] >= *count,
            Until::CountOrStop(count, stop) => {
                stop.load(Ordering::Relaxed) || self.state()?[FRAMES] >= *count
            }
            // The program ends it by its own clock. This clock may start late, but not early.
            Until::Duration(duration) => match began {
                Some(began) => began.elapsed() > *duration,
                None => {
                    *began = (self.state()?[FIRST_NS] != 0).then(Instant::now);
                    false
                }
            },
            Until::Stop(stop) => stop.load(Ordering::Relaxed),
        })
    }

    fn set_params(&mut self, until: &Until) -> Result<()> {
        let mut state = self.state()?;
        state[LIMIT] =
            if let Until::Count(count) | Until::CountOrStop(count, _) = until { *count } else { u64::MAX };
        state[DURATION] = if let Until::Duration(time) = until { nanoseconds(*time) } else { u64::MAX };
        // A float to an integer saturates: a rate of nothing is one frame in years.
        state[INTERVAL] = self.pps.map_or(0, |pps| ((256e9 / pps.max(0.0)) as u64).clamp(1, u64::MAX >> 2));
        for result in [FRAMES, FIRST_NS, LAST_NS, LATE_NS, NEXT_DUE] {
            state[result] = 0;
        }
        self.set_state(state)
    }

    fn state(&self) -> Result<State> {
        let map = self.ebpf.map("generator").context("no map generator")?;
        Array::<_, State>::try_from(map)?.get(&0, 0).context("reading the state of the generator")
    }

    fn set_state(&mut self, state: State) -> Result<()> {
        let map = self.ebpf.map_mut("generator").context("no map generator")?;
        Array::<_, State>::try_from(map)?.set(0, state, 0).context("writing the settings of the generator")
    }
}

/// Makes SIGURG interrupt a system call and do nothing else.
fn install_signal_handler() -> Result<()> {
    static INSTALLED: OnceLock<io::Result<()>> = OnceLock::new();
    let caught = INSTALLED.get_or_init(|| {
        // The flag is not used: only the handler matters.
        signal_hook::flag::register(SIGURG, Arc::new(AtomicBool::new(false))).map(|_| ())
    });
    match caught {
        Ok(()) => Ok(()),
        Err(err) => bail!("catching SIGURG: {err}"),
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
