//! Part `program`: how long a program that is always runnable is kept from running in a flood, on
//! the lane's CPU and on the one where the flood is generated and received from the link.
//! There the flood generator, a thread that needs the whole CPU, alternates with the
//! program. Its time is reported separately, and a thread that only spins in its place shows the
//! effect of the alternation itself.

use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::{Result, anyhow};
use manylane::Engine;
use manylane_measure::Traffic;

use super::pauses;
use super::plan::{FloodTestbed, PAYLOAD_SIZE, Plan, SenderLoad, Variant};
use super::server::{SenderThread, Server, ServerStats};
use crate::sample::CpuBusyTimer;
use crate::schema::{FloodSample, SENDER_CPU_PROGRAM};
use crate::{Options, check_stop};

pub(super) const VARIANTS: [Variant; 5] = [
    Variant { name: "no-flood", engine: Engine::Xdp, limit: false, sender_load: SenderLoad::Idle },
    Variant { name: "busy-thread", engine: Engine::Xdp, limit: false, sender_load: SenderLoad::BusyThread },
    Variant { name: "kernel-sockets", engine: Engine::Mmsg, limit: false, sender_load: SenderLoad::Flood },
    Variant { name: "no-limit", engine: Engine::Xdp, limit: false, sender_load: SenderLoad::Flood },
    Variant { name: "limit", engine: Engine::Xdp, limit: true, sender_load: SenderLoad::Flood },
];

pub(super) fn sample(
    bed: &FloodTestbed,
    (options, plan): (&Options, &Plan),
    (variant, pps): (&Variant, f64),
    round: usize,
    stop: &AtomicBool,
) -> Result<FloodSample> {
    let server =
        Server::start(&bed.to, bed.server_config(variant.engine, variant.limit.then_some(plan.limit)))?;
    let traffic = Traffic { pps: Some(pps), flows: options.flows, ..Traffic::new(server.addr, PAYLOAD_SIZE) };
    let clock = CpuBusyTimer::start();
    let load = variant.sender_load.start(bed, &traffic)?;
    let maker = load.as_ref().map(|load| &*load.tid);
    let lane = (variant.sender_load == SenderLoad::Flood).then_some(&*server.tid);
    let seen = thread::scope(|scope| {
        let programs = [(bed.lane_cpu, lane), (bed.sender_cpu, maker)]
            .map(|(cpu, maker)| scope.spawn(move || pauses::run_program(cpu, maker, options.duration, stop)));
        programs.map(|program| program.join().map_err(|_| anyhow!("the program panicked"))?)
    });
    let sent = load.map_or(Ok(0), SenderThread::stop)?;
    check_stop(stop)?;
    let mut sample = server.stop()?.since(&ServerStats::default(), round, sent, &clock);
    for seen in seen {
        let mut seen = seen?;
        let cpu_name = if seen.cpu == bed.lane_cpu { "program" } else { SENDER_CPU_PROGRAM };
        if seen.cpu == bed.lane_cpu {
            seen.apart.iter_mut().for_each(|gap| gap.lane_ms = std::mem::take(&mut gap.sender_ms));
        }
        sample.pauses.push(crate::schema::FloodPauses { thread: cpu_name.into(), ..seen });
    }
    Ok(sample)
}
