//! Random runs: every datagram is counted once.

use std::os::fd::AsRawFd as _;

use proptest::prelude::*;

use super::*;
use crate::DropPolicy;

/// Longest time that the flushes of one batch wait for room in the send buffer.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);

/// Longest time of the polls between two reads of the clock. A poll takes longer if the datagrams
/// that it finds are lost by a fault.
const POLLS_LIMIT: Duration = MILLIS;

/// One step of a random run.
#[derive(Clone, Debug)]
enum Step {
    /// Packets of this many datagrams, and when they arrive.
    Send(u16, u16, u64),
    /// A receive with this timeout, and a reply to each datagram.
    Echo(u64),
    Datagrams(u16),
    SendError(i32),
    SendRoom(usize),
    RecvError,
}

fn step() -> impl Strategy<Value = Step> {
    let micros = 0..2000_u64;
    let code = prop::sample::select(vec![
        errno::ENOBUFS,
        errno::EACCES,
        errno::EINVAL,
        errno::EHOSTUNREACH,
        errno::EINTR,
    ]);
    prop_oneof![
        4 => (1..30_u16, 1..4_u16, micros.clone()).prop_map(|(count, size, at)| Step::Send(count, size, at)),
        6 => micros.prop_map(Step::Echo),
        1 => (1..30_u16).prop_map(Step::Datagrams),
        1 => code.prop_map(Step::SendError),
        1 => (0..20_usize).prop_map(Step::SendRoom),
        1 => Just(Step::RecvError),
    ]
}

fn policy() -> impl Strategy<Value = WaitPolicy> {
    prop::sample::select(vec![WaitPolicy::Sleep, WaitPolicy::Spin(20 * MICROS), WaitPolicy::Adaptive])
}

fn drop_policy() -> impl Strategy<Value = DropPolicy> {
    prop::sample::select(vec![DropPolicy::Tail, DropPolicy::Head])
}

proptest! {
    #[test]
    fn counters_add_up_under_any_fault(
        (seed, loss, reordering) in (any::<u64>(), 0..500_u64, prop::sample::select(vec![0, 300_u64])),
        (queue_max, policy, drops) in (1..40_usize, policy(), drop_policy()),
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let (sim, injector) = sim_with_faults(seed);
        {
            let Faults { rx, tx, .. } = &mut *injector.faults();
            (rx.loss, rx.reordering, tx.loss, tx.reordering) = (loss, reordering, loss, reordering);
        }
        sim.network().queue_max = queue_max;
        let mut lane = lane_with(&injector, |builder| _ = builder.wait(policy).drop_policy(drops));
        let descriptor = lane.as_fd().as_raw_fd();
        let (mut offered, mut next, mut last) = (0_u64, 0_u16, Duration::ZERO);
        let (mut received, mut failed) = (Vec::new(), 0);
        for step in steps {
            let before = now(&sim);
            match step {
                Step::Send(count, size, at) => {
                    // No earlier than the packets before them.
                    last = last.max(before + Duration::from_micros(at));
                    let delay = last - before;
                    for _ in 0..count {
                        let mut payload = Vec::new();
                        (0..size).for_each(|index| payload.extend_from_slice(&(next + index).to_be_bytes()));
                        next += size;
                        let packet = Packet { payload, segment_size: 2, ..datagram(1) };
                        offered += packet.datagrams();
                        sim.network().send(packet, delay);
                    }
                }
                Step::Echo(micros) => {
                    let timeout = Duration::from_micros(micros);
                    match lane.recv_timeout(timeout) {
                        Ok(Received { batch, mut out }) => batch.for_each(|request| {
                            received.push(number(request.payload()));
                            out.reply(&request, request.payload());
                        }),
                        Err(_) => failed += 1,
                    }
                    let limit = timeout + POLLS_LIMIT + FLUSH_LIMIT;
                    prop_assert!(now(&sim) - before <= limit);
                }
                Step::Datagrams(count) => {
                    let mut out = lane.sender();
                    (0..count).for_each(|number| out.send_to(peer(number), b"to whom it may concern"));
                }
                Step::SendError(code) => injector.faults().send_errors.push_back(code),
                Step::SendRoom(room) => {
                    let mut faults = injector.faults();
                    faults.send_room = room;
                    faults.send_drains = [(30 * MILLIS, 5)].into();
                }
                Step::RecvError => injector.faults().recv_errors = [errno::ENOBUFS].into(),
            }
        }
        prop_assert_eq!(lane.as_fd().as_raw_fd(), descriptor);
        let total = close(lane);
        let (network, faults) = (sim.network(), injector.faults());
        prop_assert_eq!(total.arrived() + faults.rx.lost + network.lost, offered);
        prop_assert_eq!(total.xsk_dropped, network.dropped);
        prop_assert_eq!((total.delivered, total.recv_errors), (received.len() as u64, failed));
        let sent: u64 = network.sent.iter().map(|sent| sent.datagrams).sum();
        prop_assert_eq!(total.sent, sent + faults.tx.lost);
        let lost = total.lost_sndbuf_full + total.lost_no_buffers + total.lost_unreachable
            + total.lost_denied + total.lost_other + total.lost_too_large;
        prop_assert_eq!(total.offered, total.sent + lost);
        prop_assert!(reordering > 0 || received.is_sorted());
    }
}
