//! Established connections: segments that come in, and what is sent when something is due.

use std::time::Duration;

use manylane_wire::tcp::Flags;

use crate::connection::{Need, Open, Phase};
use crate::core::Core;
use crate::edge::Verdict;
use crate::endpoint::Progress;
use crate::event::{Reason, What};
use crate::output::Output;
use crate::packet::{Segment, length32};
use crate::sending::Sending;
use crate::sequence::later;
use crate::time::Time;

/// How long an idle connection keeps buffers that others need: some round trips, because one that
/// is in the middle of a transfer would lose what is on the way.
const KEPT_WHEN_SHORT: Duration = Duration::from_millis(10);

/// Takes a segment of an established connection, in place.
pub(crate) fn input<O: Output>(
    core: &mut Core,
    index: u32,
    packet: &mut [u8],
    segment: &Segment,
    now: Time,
    out: &mut O,
) {
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return };
    let mut passed = match open.edge.judge(segment) {
        Verdict::Pass(passed) => passed,
        // Both sides have finished, and not all is read: as in TIME-WAIT (RFC 1337).
        Verdict::Reset if open.is_in_time_wait() => {
            core.counters.dropped_unacceptable += 1;
            return;
        }
        Verdict::Reset => return core.end(index, Reason::Reset),
        verdict => {
            let answer = match verdict {
                Verdict::Acknowledge => Some(open.edge.control(Flags::ACK, open.edge.send_next, now)),
                Verdict::Challenge => open.edge.challenge(now),
                _ => None,
            };
            core.counters.dropped_unacceptable += 1;
            if let Some(answer) = answer {
                core.counters.challenges_sent += u64::from(verdict == Verdict::Challenge);
                core.send(&answer, out);
            }
            return;
        }
    };
    (open.heard, open.probes) = (now, 0);
    if open.endpoint.as_ref().is_some_and(|endpoint| endpoint.has_peer_finished()) {
        // There is nothing behind FIN (RFC 9293, section 3.10.7.4); smoltcp would take it.
        (passed.payload, passed.fin) = (0, false);
    }
    let has_data = passed.payload > 0 || passed.fin;
    if open.endpoint.is_none() && !has_data {
        // All that it says is in the edge now.
        return;
    }
    let is_only_fin_sent = open.edge.in_flight() > 0
        && open.endpoint.as_ref().is_some_and(|endpoint| endpoint.unacknowledged() == 0);
    if is_only_fin_sent && !has_data && passed.acknowledgment == open.edge.unacknowledged {
        // The third one of these would stop smoltcp's timer, and FIN would never be sent again.
        return;
    }
    if open.orphaned.is_some() && passed.payload > 0 {
        // No one will read it, and the peer has to know.
        return abort(core, index);
    }
    if !core.wake(index, Need::Input, now) {
        core.counters.dropped_no_buffers += 1;
        return;
    }
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return };
    let Some(endpoint) = &mut open.endpoint else { return };
    open.active = now;
    let (unacknowledged, in_flight) = (open.edge.unacknowledged, open.edge.in_flight());
    let is_plain = !has_data && !passed.tells_window && in_flight > 0 && !open.edge.is_probing();
    let Some(inner) = open.edge.pass(packet, segment, &passed) else { return };
    let end = passed.sequence.wrapping_add(length32(passed.payload));
    open.edge.receive_last = later(open.edge.receive_last, end);
    let sent = endpoint.input(&mut core.machine, &mut open.edge, inner, now, out);
    let acknowledged = open.edge.unacknowledged.wrapping_sub(unacknowledged);
    let can_resend = endpoint.can_resend();
    let duplicate = (is_plain && can_resend, can_resend);
    let reaction = open.sender.on_ack(&open.edge, acknowledged, &segment.options.sack, duplicate, now);
    core.counters.losses += u64::from(reaction.is_loss);
    if reaction.resends {
        endpoint.resend_oldest(&mut core.machine, &open.edge, now);
    }
    if let Some(sent) = sent {
        core.counters.segments_out += 1;
        open.sender.on_sent(&open.edge, &sent, in_flight, now);
    }
    tell_news(core, index);
    core.mark_ready(index);
}

/// Tells the application what a segment has brought.
fn tell_news(core: &mut Core, index: u32) {
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return };
    let Some(endpoint) = &open.endpoint else { return };
    if open.orphaned.is_some() {
        return;
    }
    let is_readable = endpoint.readable() > 0 || endpoint.has_peer_finished();
    let tell_readable = is_readable && !std::mem::replace(&mut open.told_readable, is_readable);
    // Not for each segment that is acknowledged: for a third of all, as in Linux.
    let held = endpoint.unacknowledged();
    let tell_writable = open.wants_to_write && endpoint.writable() * 2 > held;
    open.wants_to_write &= !tell_writable;
    if tell_readable {
        core.tell(index, What::Readable);
    }
    if tell_writable {
        core.tell(index, What::Writable);
    }
}

/// The application gives a connection up, and the peer is told by a reset.
pub(crate) fn abort(core: &mut Core, index: u32) {
    if let Some(Phase::Open(open)) = core.table.phase_mut(index) {
        open.is_aborted = true;
        core.mark_ready(index);
    }
}

/// Sends what is due, ends what is over, and sets the next deadline. False if the output is full.
pub(crate) fn drive<O: Output>(core: &mut Core, index: u32, now: Time, out: &mut O) -> bool {
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return true };
    open.is_ready = false;
    let is_orphan_over = open.orphaned.is_some_and(|at| now.since(at) >= core.config.orphan_timeout);
    if open.is_aborted || is_orphan_over {
        let reset = open.edge.control(Flags::RST.with(Flags::ACK), open.edge.send_next, now);
        if !core.send(&reset, out) {
            return false;
        }
        core.counters.resets_sent += 1;
        core.end(index, Reason::Finished);
        return true;
    }
    if open.is_finishing || open.wants_to_write && open.endpoint.is_none() {
        resume(core, index, now);
    }
    if matches!(core.table.phase(index), Some(Phase::Open(Open { endpoint: Some(_), .. }))) {
        drive_endpoint(core, index, now, out)
    } else {
        drive_idle(core, index, now, out)
    }
}

/// Does what the application wanted to do when no buffers were left, or waits for them again.
fn resume(core: &mut Core, index: u32, now: Time) {
    let Some(Phase::Open(open)) = core.table.phase(index) else { return };
    if !core.wake(index, open.need, now) {
        return core.wait_for_buffers(index);
    }
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return };
    open.active = now;
    if let (true, Some(endpoint)) = (std::mem::take(&mut open.is_finishing), &mut open.endpoint) {
        endpoint.finish();
    }
    if std::mem::take(&mut open.wants_to_write) {
        core.tell(index, What::Writable);
    }
}

/// [`drive`] of a connection with a state machine.
fn drive_endpoint<O: Output>(core: &mut Core, index: u32, now: Time, out: &mut O) -> bool {
    let is_short = !core.may_take(Need::Input);
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return true };
    let Open { edge, sender, endpoint: Some(endpoint), heard, active, .. } = open else { return true };
    let is_in_time_wait = endpoint.progress() == Progress::TimeWait;
    let (machine, counters) = (&mut core.machine, &mut core.counters);
    let mut sending = Sending { machine, counters, edge, sender, endpoint, heard, active, now, out };
    let Ok(due) = sending.send() else {
        core.counters.output_full += 1;
        return false;
    };
    let is_waiting = open.edge.in_flight() > 0 || endpoint.unacknowledged() > 0;
    let give_up = open.heard + core.config.user_timeout;
    if is_waiting && now >= give_up {
        core.end(index, Reason::TimedOut);
        return true;
    }
    let progress = endpoint.progress();
    if progress != Progress::Going && (endpoint.readable() == 0 || open.orphaned.is_some()) {
        finish(core, index, progress, now);
        return true;
    }
    // With a hole, bytes are kept that the peer need not send again.
    let kept = match open.edge.has_hole() {
        true => core.config.user_timeout,
        false if is_short => core.config.buffers_kept.min(KEPT_WHEN_SHORT),
        false => core.config.buffers_kept,
    };
    let rest_at = open.active + kept;
    let is_idle = endpoint.is_idle(&open.edge);
    if is_idle && now >= rest_at {
        core.rest(index);
        return drive_idle(core, index, now, out);
    }
    let orphan_at = open.orphaned.map(|at| at + core.config.orphan_timeout);
    let probe_at = match is_waiting || is_in_time_wait {
        // What is sent asks the peer, or it is not needed any more.
        true => None,
        false => match keep_alive(core, index, now, out) {
            KeepAlive::Next(at) => at,
            KeepAlive::Full => return false,
            KeepAlive::Over => return true,
        },
    };
    let deadlines = [due, is_waiting.then_some(give_up), is_idle.then_some(rest_at), orphan_at, probe_at];
    set_deadline(core, index, deadlines.into_iter().flatten().min());
    true
}

/// [`drive`] of a connection that has nothing to do.
fn drive_idle(core: &mut Core, index: u32, now: Time, out: &mut impl Output) -> bool {
    let probe_at = match keep_alive(core, index, now, out) {
        KeepAlive::Next(at) => at,
        KeepAlive::Full => return false,
        KeepAlive::Over => return true,
    };
    let Some(Phase::Open(open)) = core.table.phase(index) else { return true };
    let orphan_at = open.orphaned.map(|at| at + core.config.orphan_timeout);
    set_deadline(core, index, [orphan_at, probe_at].into_iter().flatten().min());
    true
}

/// What has come of keep-alive.
enum KeepAlive {
    /// When the next probe is due.
    Next(Option<Time>),
    /// The output is full.
    Full,
    /// The peer has not answered, and the connection is over.
    Over,
}

/// Asks the peer whether it is still there, if that is due.
fn keep_alive(core: &mut Core, index: u32, now: Time, out: &mut impl Output) -> KeepAlive {
    let Some(time) = core.config.keep_alive else { return KeepAlive::Next(None) };
    let Some(Phase::Open(open)) = core.table.phase(index) else { return KeepAlive::Over };
    let at = |open: &Open, probes: u8| open.heard + time + time / 10 * u32::from(probes);
    if now < at(open, open.probes) {
        return KeepAlive::Next(Some(at(open, open.probes)));
    }
    if open.probes >= core.config.keep_alive_probes {
        core.end(index, Reason::TimedOut);
        return KeepAlive::Over;
    }
    // One that was sent before: the peer answers with what it expects (RFC 9293, section 3.8.4).
    let probe = open.edge.control(Flags::ACK, open.edge.send_next.wrapping_sub(1), now);
    if !core.send(&probe, out) {
        return KeepAlive::Full;
    }
    let Some(Phase::Open(open)) = core.table.phase_mut(index) else { return KeepAlive::Over };
    open.probes += 1;
    // Later than now: a late call sends one probe, not all that it has missed.
    let next = at(open, open.probes).max(now + time / 10);
    KeepAlive::Next(Some(next))
}

fn set_deadline(core: &mut Core, index: u32, at: Option<Time>) {
    match at {
        Some(at) => core.wheel.set(index, at),
        None => core.wheel.cancel(index),
    }
}

/// Both sides have closed it: what has to be remembered of it is.
fn finish(core: &mut Core, index: u32, progress: Progress, now: Time) {
    if let (Progress::TimeWait, Some(Phase::Open(open))) = (progress, core.table.phase(index)) {
        let edge = &open.edge;
        let numbers = (edge.send_next, edge.receive_next);
        core.time_wait.add(&core.secret, edge.flow, numbers, edge.recent_timestamp(), now);
    }
    core.end(index, Reason::Finished);
}
