//! The library's side of the report: claims slots, writes counters. Without a report file it does
//! nothing.
//!
//! The report is sealed memory ([`manylane_ipc::report`]). The program inherits its descriptor, as
//! it inherits that of the lessor; it is hidden from the program.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use libc::c_int;
use manylane_ipc::report::{CLAIMED, ENDED, FREE, NO_LANE, OPEN, Reason, Receiver, Report, ReportFile};

use crate::base::{real, state};
use crate::shared::sock::Member;

static REPORT: OnceLock<ReportFile> = OnceLock::new();
/// The descriptor that child programs inherit; negative if there is none.
static REPORT_FD: AtomicI32 = AtomicI32::new(-1);

/// Maps the report, if there is one. Returns its descriptor if child programs inherit it. An
/// invalid path is reported in one line on standard error.
pub(crate) fn start() -> Option<c_int> {
    let path = state::settings().and_then(|settings| settings.report.as_ref())?;
    let inherited = match ReportFile::find(path) {
        Ok((file, inherited)) => {
            _ = REPORT.set(file);
            inherited
        }
        Err(err) => {
            real::log(&format!("MANYLANE_REPORT={}: {err}; writing no report", path.display()));
            None
        }
    };
    REPORT_FD.store(inherited.unwrap_or(-1), Ordering::Relaxed);
    count_process();
    inherited
}

/// True if `fd` is the report's descriptor.
pub(crate) fn is_report_fd(fd: c_int) -> bool {
    REPORT_FD.load(Ordering::Relaxed) == fd
}

fn report() -> Option<&'static Report> {
    REPORT.get().map(ReportFile::report)
}

/// Counts a process that has the library: one that started, or was forked.
pub(crate) fn count_process() {
    if let Some(report) = report() {
        report.header.processes.fetch_add(1, Ordering::Relaxed);
        report.header.last_pid.store(std::process::id(), Ordering::Relaxed);
    }
}

/// True if there is a report.
#[inline]
pub(crate) fn is_open() -> bool {
    report().is_some()
}

/// Counts a UDP socket bound to a port that may have lanes.
pub(crate) fn count_socket() {
    if let Some(report) = report() {
        report.header.sockets.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts why a socket became plain, or stays so.
pub(crate) fn count_reason(reason: Reason, addr: Option<SocketAddr>) {
    let Some(report) = report() else { return };
    let slot = &report.reasons[reason as usize];
    slot.last_pid.store(std::process::id(), Ordering::Relaxed);
    if let Some(addr) = addr {
        slot.last_addr.set(&addr);
    }
    slot.count.fetch_add(1, Ordering::Relaxed);
}

/// Claims a slot for a thread that receives. Returns the value of [`Member::slot`].
pub(crate) fn claim_slot(tid: u32, addr: Option<SocketAddr>, inode: u64) -> u32 {
    let Some(report) = report() else { return 0 };
    for wanted in [FREE, ENDED] {
        for (at, slot) in report.receivers.iter().enumerate() {
            if slot.state.load(Ordering::Relaxed) != wanted
                || slot.state.compare_exchange(wanted, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                continue;
            }
            slot.clear();
            slot.pid.store(std::process::id(), Ordering::Relaxed);
            slot.tid.store(tid, Ordering::Relaxed);
            slot.lane.store(NO_LANE, Ordering::Relaxed);
            slot.inode.store(inode, Ordering::Relaxed);
            if let Some(addr) = addr {
                slot.addr.set(&addr);
            }
            slot.state.store(OPEN, Ordering::Release);
            return at as u32 + 1;
        }
    }
    report.header.full.fetch_add(1, Ordering::Relaxed);
    0
}

/// The report slot of a member. By index, not address: other processes may write the members,
/// which must hold no pointers.
#[inline]
fn slot_of(member: &Member) -> Option<&'static Receiver> {
    let slot = member.slot.load(Ordering::Relaxed);
    if slot == 0 { None } else { report()?.receivers.get(slot as usize - 1) }
}

fn add(cell: &AtomicU64, n: u64) {
    // One writer: a load and a store are enough, without a locked instruction. Other processes
    // have the report mapped and may write it all the same: never rely on the number.
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// Counts datagrams that a call of the program received. `held`: without a call to the kernel.
#[inline]
pub(crate) fn record_received(member: &Member, datagrams: u64, bytes: u64, helped: bool, held: bool) {
    let Some(slot) = slot_of(member) else { return };
    add(&slot.delivered, datagrams);
    add(&slot.delivered_bytes, bytes);
    add(&slot.batches, u64::from(!held));
    if helped {
        add(&slot.delivered_from_other_lanes, datagrams);
    }
}

/// Counts datagrams received as frames, and invalid frames that were dropped.
#[inline]
pub(crate) fn record_received_frames(member: &Member, datagrams: u64, bad: u64) {
    let Some(slot) = slot_of(member) else { return };
    add(&slot.delivered_by_bypass, datagrams);
    add(&slot.bad_frames, bad);
}

/// Counts a datagram sent as a frame.
#[inline]
pub(crate) fn record_sent_frame(member: &Member) {
    if let Some(slot) = slot_of(member) {
        add(&slot.sent_by_bypass, 1);
    }
}

/// Counts datagrams that a call of the program sent.
#[inline]
pub(crate) fn record_sent(member: &Member, datagrams: u64, bytes: u64) {
    let Some(slot) = slot_of(member) else { return };
    add(&slot.sent, datagrams);
    add(&slot.sent_bytes, bytes);
    add(&slot.send_calls, 1);
}

/// Counts a datagram of the program that was queued, or sent with queued ones.
#[inline]
pub(crate) fn record_batched(member: &Member, bytes: u64) {
    let Some(slot) = slot_of(member) else { return };
    add(&slot.sent, 1);
    add(&slot.sent_bytes, bytes);
}

/// Counts the calls to the kernel that sent queued replies.
pub(crate) fn record_send_calls(member: &Member, calls: u64) {
    if let Some(slot) = slot_of(member) {
        add(&slot.send_calls, calls);
    }
}

/// Records that a member got or lost a lane; `inode` is that of its present kernel socket.
pub(crate) fn record_lane(member: &Member, lane: c_int, inode: u64) {
    if let Some(slot) = slot_of(member) {
        slot.inode.store(inode, Ordering::Relaxed);
        slot.lane.store(u32::try_from(lane).unwrap_or(NO_LANE), Ordering::Relaxed);
    }
}

/// The member is gone: its counts stay in the report.
pub(crate) fn release_slot(member: &Member) {
    if let Some(slot) = slot_of(member) {
        slot.state.store(ENDED, Ordering::Release);
    }
    member.slot.store(0, Ordering::Relaxed);
}
