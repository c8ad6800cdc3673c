//! The library's report: its file, and a snapshot of its contents.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use anyhow::{Context, Result};
use manylane_ipc::report::{self, Addr, ReportFile};
use manylane_sys::fd;
use serde::Serialize;

/// The file, in memory. Programs inherit its descriptor. A program that is started without it
/// finds it by its path, as long as this value lives. Processes that have mapped it keep it.
pub(super) struct SharedReport {
    file: ReportFile,
    inherited: OwnedFd,
}

impl SharedReport {
    /// Creates the file.
    ///
    /// # Errors
    /// Without memory or descriptors for it.
    pub(super) fn new() -> Result<Self> {
        let (file, fd) = ReportFile::create()
            .context("cannot create the report (raise ulimit -n, ulimit -v or the memory cgroup's limit)")?;
        let inherited = fd::dup_inheritable(fd.as_fd())
            .context("cannot pass the report to the program (raise ulimit -n)")?;
        Ok(Self { file, inherited })
    }

    /// The path by which the library finds it.
    pub(super) fn path(&self) -> PathBuf {
        ReportFile::path(self.inherited.as_fd())
    }

    /// A snapshot of its contents.
    pub(super) fn read(&self) -> Report {
        Self::snapshot(self.file.report())
    }

    /// A reader for another thread.
    pub(super) fn reader(&self) -> impl Fn() -> Report + Send + 'static {
        let report = self.file.report();
        move || Self::snapshot(report)
    }

    fn snapshot(report: &report::Report) -> Report {
        let reasons = report::Reason::ALL.into_iter().zip(&report.reasons);
        let used =
            |slot: &&report::Receiver| matches!(slot.state.load(Relaxed), report::OPEN | report::ENDED);
        Report {
            processes: report.header.processes.load(Relaxed),
            last_pid: report.header.last_pid.load(Relaxed),
            sockets: report.header.sockets.load(Relaxed),
            receivers: report.receivers.iter().filter(used).map(Receiver::from_slot).collect(),
            fallbacks: reasons
                .filter(|(_, slot)| slot.count.load(Relaxed) > 0)
                .map(|(reason, slot)| Fallback {
                    reason: reason.name(),
                    why: reason.description(),
                    count: slot.count.load(Relaxed),
                    pid: slot.last_pid.load(Relaxed),
                    socket: format_addr(&slot.last_addr),
                })
                .collect(),
            left_out: report.header.full.load(Relaxed),
        }
    }
}

fn format_addr(addr: &Addr) -> String {
    addr.read().map_or_else(String::new, |addr| addr.to_string())
}

/// A snapshot of the report.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Report {
    /// Processes that loaded the library, or were forked by such a process.
    pub(super) processes: u32,
    /// PID of the last of those.
    pub(super) last_pid: u32,
    /// UDP sockets that were bound.
    pub(super) sockets: u32,
    /// Threads that receive on a socket, including those that have ended.
    pub(super) receivers: Vec<Receiver>,
    /// Reasons why sockets stayed plain or became plain again.
    pub(super) fallbacks: Vec<Fallback>,
    /// Receivers for which the file had no room.
    pub(super) left_out: u32,
}

macro_rules! receiver {
    ($($(#[doc = $doc:literal])* $name:ident;)*) => {
        /// A thread that receives on a socket.
        #[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
        pub(super) struct Receiver {
            /// Address that the socket is bound to.
            pub(super) socket: String,
            /// Number of its lane; none if it shares the program's own socket.
            pub(super) lane: Option<u32>,
            /// PID of its process.
            pub(super) pid: u32,
            /// Id of the thread.
            pub(super) tid: u32,
            /// True if it still receives.
            pub(super) open: bool,
            $($(#[doc = $doc])* pub(super) $name: u64,)*
            /// Inode of the kernel socket of its lane; 0 if it is not known.
            #[serde(skip)]
            pub(super) inode: u64,
        }

        impl Receiver {
            /// The counters.
            pub(super) const COUNTERS: &'static [Counter] = &[
                $(Counter {
                    metric: concat!("manylane_run_", stringify!($name), "_total"),
                    doc: concat!($($doc),*),
                    value: |receiver| receiver.$name,
                },)*
            ];

            fn from_slot(slot: &report::Receiver) -> Self {
                Self {
                    socket: format_addr(&slot.addr),
                    lane: Some(slot.lane.load(Relaxed)).filter(|&lane| lane != report::NO_LANE),
                    pid: slot.pid.load(Relaxed),
                    tid: slot.tid.load(Relaxed),
                    open: slot.state.load(Relaxed) == report::OPEN,
                    $($name: slot.$name.load(Relaxed),)*
                    inode: slot.inode.load(Relaxed),
                }
            }
        }
    };
}

manylane_ipc::receiver_counters!(receiver);

/// A counter of a [`Receiver`].
pub(super) struct Counter {
    /// Its name in metrics.
    pub(super) metric: &'static str,
    /// The documentation, with a space before each line.
    doc: &'static str,
    pub(super) value: fn(&Receiver) -> u64,
}

impl Counter {
    /// Its help in metrics.
    pub(super) fn help(&self) -> &'static str {
        self.doc.trim_start()
    }
}

/// A socket that fell back.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Fallback {
    /// The reason in one word.
    pub(super) reason: &'static str,
    /// The reason as a sentence.
    pub(super) why: &'static str,
    /// Number of times.
    pub(super) count: u64,
    /// The process in which it happened last.
    pub(super) pid: u32,
    /// The socket to which it happened last; empty if it had no address.
    pub(super) socket: String,
}

impl Report {
    /// Datagrams delivered to and sent by all receivers.
    pub(super) fn total(&self) -> (u64, u64) {
        (self.sum(|one| one.delivered), self.sum(|one| one.sent))
    }

    /// Sum over all receivers. The numbers are written by the program, so the sum must not
    /// overflow.
    pub(super) fn sum(&self, of: fn(&Receiver) -> u64) -> u64 {
        self.receivers.iter().map(of).fold(0, u64::saturating_add)
    }

    /// Number of lanes.
    pub(super) fn lanes(&self) -> usize {
        let lanes = self.receivers.iter().filter_map(|one| Some((&one.socket, one.lane?)));
        lanes.collect::<BTreeSet<_>>().len()
    }

    /// The known PIDs.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        let known = self.receivers.iter().map(|one| one.pid);
        known.chain([self.last_pid]).filter(|&pid| pid != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn report_pages_of_the_library_are_read() {
        let shared = SharedReport::new().unwrap();
        let path = shared.path();
        assert_eq!(shared.read(), Report::default());
        let theirs = ReportFile::open(&path).unwrap().report();
        theirs.header.processes.store(1, Relaxed);
        theirs.header.last_pid.store(70, Relaxed);
        for (at, (lane, state)) in
            [(0, report::OPEN), (1, report::ENDED), (report::NO_LANE, report::OPEN), (2, report::CLAIMED)]
                .into_iter()
                .enumerate()
        {
            let slot = &theirs.receivers[at];
            slot.addr.set(&"127.0.0.1:53".parse().unwrap());
            slot.lane.store(lane, Relaxed);
            slot.pid.store(7, Relaxed);
            slot.delivered.store(100, Relaxed);
            slot.bad_frames.store(at as u64, Relaxed);
            slot.inode.store(40 + at as u64, Relaxed);
            slot.state.store(state, Relaxed);
        }
        theirs.reasons[report::Reason::Passed as usize].count.store(2, Relaxed);
        let report = shared.read();
        assert_eq!((report.lanes(), report.receivers.len(), report.total()), (2, 3, (300, 0)));
        assert_eq!((report.receivers[1].lane, report.receivers[1].bad_frames), (Some(1), 1));
        assert_eq!((report.receivers[0].open, report.receivers[1].open), (true, false));
        assert_eq!((report.receivers[2].lane, report.receivers[2].inode), (None, 42));
        assert_eq!(report.pids().into_iter().collect::<Vec<_>>(), [7, 70]);
        assert!(matches!(&report.fallbacks[..], [one] if one.reason == "passed" && one.count == 2));
        // The program may write invalid values.
        theirs.receivers[0].delivered.store(u64::MAX, Relaxed);
        theirs.receivers[0].bad_frames.store(u64::MAX, Relaxed);
        let report = shared.read();
        assert_eq!((report.total(), report.sum(|one| one.bad_frames)), ((u64::MAX, 0), u64::MAX));
    }
}
