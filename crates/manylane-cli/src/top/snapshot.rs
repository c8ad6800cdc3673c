//! One sample: the metrics of processes with a control socket, the CPU time of their threads, and
//! the state of the CPUs.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::time::Instant;

use anyhow::Result;
use manylane::{LaneCounters, control};
use manylane_measure::machine;
use serde::Serialize;

use super::prometheus::{ROWS_MAX, Sample, parse_samples};
use super::tcp::{self, TcpCounts};
use crate::output;

/// A sample.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    /// Time of the sample; none in tests, which give the interval.
    pub(super) at: Option<Instant>,
    /// Lanes, by process, socket and lane.
    pub(super) lanes: BTreeMap<Key, Lane>,
    pub(super) sockets: BTreeMap<(u32, String), FilterDrops>,
    /// Leased rings, by launcher, socket, device and queue.
    pub(super) rings: BTreeMap<((u32, String, String), u32), Ring>,
    pub(super) cpus: BTreeMap<u32, Cpu>,
    pub(super) silent: Vec<Silent>,
}

/// A process that did not answer on its control socket, or has too many rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Silent {
    pub(super) pid: u32,
    pub(super) why: String,
}

/// The identity of a lane.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) pid: u32,
    pub(super) socket: String,
    /// Sorted by number; lanes without one come last.
    pub(super) number: u64,
    pub(super) lane: String,
    /// Threads of a program under `manylane run` may share a lane.
    pub(super) thread: Option<u32>,
}

/// One lane with its counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Lane {
    pub(super) program: String,
    pub(super) engine: String,
    pub(super) thread: Option<u32>,
    pub(super) delivered: u64,
    pub(super) sent: u64,
    pub(super) queued: Option<u64>,
    pub(super) queue_limit: Option<u64>,
    /// Frames queued in the rings of its queues, and the size of the rings; none without engine
    /// xdp.
    pub(super) ring_frames: Option<u64>,
    pub(super) ring_entries: Option<u64>,
    /// Losses by reason.
    pub(super) lost: BTreeMap<String, u64>,
    /// CPU time of its thread, in nanoseconds.
    pub(super) cpu: Option<u64>,
    /// Of a lane of TCP: its packets are the counters above.
    pub(super) tcp: Option<TcpCounts>,
}

/// Datagrams that the filter of a socket dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FilterDrops {
    pub(super) denied: u64,
    pub(super) limited: u64,
}

/// The receive ring of a queue that is leased to a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ring {
    pub(super) frames: u64,
    pub(super) entries: u64,
    pub(super) dropped: u64,
}

/// Clock ticks of a CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cpu {
    pub(super) softirq: u64,
    pub(super) idle: u64,
    pub(super) total: u64,
}

impl Snapshot {
    /// Queries all processes, or only process `of`.
    ///
    /// # Errors
    /// If there is no process `of`, or if processes cannot be listed.
    pub(super) fn collect(of: Option<u32>) -> Result<Self> {
        let mut snapshot = Self { cpus: cpus(&read("/proc/stat")), ..Self::default() };
        let clients = control::find_control_sockets(of)?;
        for (client, reply) in clients.iter().zip(control::fetch_metrics(&clients)) {
            let pid = client.pid();
            match reply {
                Ok(page) => snapshot.add(pid, &process_name(pid), &page),
                // A process that has ended meanwhile is ignored.
                Err(err) if err.kind() == manylane::ErrorKind::State => {}
                Err(err) => snapshot.silent.push(Silent { pid, why: err.to_string() }),
            }
        }
        // The sockets of a process follow each other.
        snapshot.silent.dedup();
        for (key, lane) in &mut snapshot.lanes {
            // The program has another PID than its launcher, whose control socket this is.
            // `/proc/PID/task` lists the program's threads.
            lane.cpu = lane.thread.and_then(|tid| run_time(key.pid, tid));
        }
        snapshot.at = Some(Instant::now());
        Ok(snapshot)
    }

    fn row_count(&self) -> usize {
        self.lanes.len() + self.sockets.len() + self.rings.len()
    }

    /// Adds the metrics page of a process.
    pub(super) fn add(&mut self, pid: u32, program: &str, page: &str) {
        let rows = self.row_count();
        let mut is_whole = true;
        for sample in parse_samples(page) {
            // The rows that are there get all their values.
            let has_room = self.row_count() - rows < ROWS_MAX;
            let added = if let Some(name) = sample.name.strip_prefix("manylane_lane_") {
                sample.label("lane") == "closed" || self.add_to_lane(pid, program, name, &sample, has_room)
            } else if let Some(name) = sample.name.strip_prefix("manylane_proxy_")
                && !sample.label("lane").is_empty()
            {
                self.add_to_tcp_lane(pid, program, name, &sample, has_room)
            } else if sample.name == "manylane_filter_dropped_total"
                || sample.name == "manylane_run_filter_dropped_total"
            {
                self.add_to_socket(pid, &sample, has_room)
            } else if let Some(name) = sample.name.strip_prefix("manylane_run_ring_") {
                self.add_to_ring(pid, name, &sample, has_room)
            } else if let Some(name) = sample.name.strip_prefix("manylane_run_") {
                self.add_to_receiver(program, name, &sample, has_room)
            } else {
                true
            };
            is_whole &= added;
        }
        if !is_whole {
            let why = format!("process {pid} has too many lanes and sockets: {ROWS_MAX} of them are shown");
            self.silent.push(Silent { pid, why });
        }
    }

    /// The filter of a socket. False if there is no room for it.
    fn add_to_socket(&mut self, pid: u32, sample: &Sample<'_>, has_room: bool) -> bool {
        let Some(socket) = row(&mut self.sockets, (pid, sample.label("socket").into()), has_room) else {
            return false;
        };
        match sample.label("reason") {
            "denied" => socket.denied = sample.value,
            "limited" => socket.limited = sample.value,
            _ => {}
        }
        true
    }

    /// A leased ring. False if there is no room for it.
    fn add_to_ring(&mut self, pid: u32, name: &str, sample: &Sample<'_>, has_room: bool) -> bool {
        let of = (pid, sample.label("socket").into(), sample.label("device").into());
        let key = (of, sample.label("queue").parse().unwrap_or(0));
        let Some(ring) = row(&mut self.rings, key, has_room) else { return false };
        match name {
            "frames" => ring.frames = sample.value,
            "entries" => ring.entries = sample.value,
            "dropped_total" => ring.dropped = sample.value,
            _ => {}
        }
        true
    }

    /// A lane of the library. False if there is no room for it.
    fn add_to_lane(
        &mut self,
        pid: u32,
        program: &str,
        name: &str,
        sample: &Sample<'_>,
        has_room: bool,
    ) -> bool {
        let Some(seen) = row(&mut self.lanes, lane_key(pid, sample), has_room) else { return false };
        seen.program = program.into();
        seen.engine = sample.label("engine").into();
        let counter = name.strip_suffix("_total").unwrap_or(name);
        match counter {
            "delivered" => seen.delivered = sample.value,
            "sent" => seen.sent = sample.value,
            "queued_bytes" => seen.queued = Some(sample.value),
            "queue_limit_bytes" => seen.queue_limit = Some(sample.value),
            "ring_frames" => seen.ring_frames = Some(sample.value),
            "ring_entries" => seen.ring_entries = Some(sample.value),
            "thread" => seen.thread = u32::try_from(sample.value).ok(),
            _ if LaneCounters::is_loss(counter) && sample.value > 0 => {
                seen.lost.insert(counter.into(), sample.value);
            }
            _ => {}
        }
        true
    }

    /// A lane of a proxy of TCP. False if there is no room for it.
    fn add_to_tcp_lane(
        &mut self,
        pid: u32,
        program: &str,
        name: &str,
        sample: &Sample<'_>,
        has_room: bool,
    ) -> bool {
        let Some(seen) = row(&mut self.lanes, lane_key(pid, sample), has_room) else { return false };
        seen.program = program.into();
        seen.engine = format!("tcp/{}", sample.label("stack"));
        let (name, value) = (name.strip_suffix("_total").unwrap_or(name), sample.value);
        seen.tcp.get_or_insert_default().set(name, value);
        match name.strip_prefix("stack_") {
            Some("segments_in") => seen.delivered = value,
            Some("segments_out") => seen.sent = value,
            Some(counter) if tcp::is_loss(counter) && value > 0 => {
                seen.lost.insert(counter.into(), value);
            }
            None if name == "lane_thread" => {
                seen.thread = u32::try_from(value).ok().filter(|thread| *thread > 0);
            }
            _ => {}
        }
        true
    }

    /// A receiving thread of a program under `manylane run`. False if there is no room for it.
    fn add_to_receiver(&mut self, program: &str, name: &str, sample: &Sample<'_>, has_room: bool) -> bool {
        let number = |label| sample.label(label).parse::<u32>().ok();
        let (Some(pid), Some(tid)) = (number("pid"), number("tid")) else { return true };
        let lane = number("lane");
        let key = Key {
            pid,
            socket: sample.label("socket").into(),
            number: lane.map_or(u64::MAX, u64::from),
            lane: lane.map_or_else(|| "-".into(), |lane| lane.to_string()),
            thread: Some(tid),
        };
        let is_new = !self.lanes.contains_key(&key);
        let Some(seen) = row(&mut self.lanes, key, has_room) else { return false };
        if is_new {
            let own = process_name(pid);
            seen.program = if own.is_empty() { program.into() } else { own };
            seen.engine = "run".into();
            seen.thread = Some(tid);
        }
        match name {
            "delivered_total" => seen.delivered = sample.value,
            "sent_total" => seen.sent = sample.value,
            "queued_bytes" => seen.queued = Some(sample.value),
            "queue_limit_bytes" => seen.queue_limit = Some(sample.value),
            "kernel_dropped_total" | "bad_frames_total" if sample.value > 0 => {
                seen.lost.insert(name.trim_end_matches("_total").into(), sample.value);
            }
            _ => {}
        }
        true
    }
}

/// The lane of a sample.
fn lane_key(pid: u32, sample: &Sample<'_>) -> Key {
    let lane = sample.label("lane");
    let number = lane.parse().unwrap_or(u64::MAX);
    Key { pid, socket: sample.label("socket").into(), number, lane: lane.into(), thread: None }
}

/// The row of a key; none if it would be a new one without room for it.
fn row<K: Ord, V: Default>(rows: &mut BTreeMap<K, V>, key: K, has_room: bool) -> Option<&mut V> {
    match rows.entry(key) {
        Entry::Vacant(_) if !has_room => None,
        entry => Some(entry.or_default()),
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The name of a process; empty if it has ended.
fn process_name(pid: u32) -> String {
    output::strip_control(&read(&format!("/proc/{pid}/comm")))
}

/// CPU time of a thread, in nanoseconds.
fn run_time(pid: u32, tid: u32) -> Option<u64> {
    read(&format!("/proc/{pid}/task/{tid}/schedstat")).split_ascii_whitespace().next()?.parse().ok()
}

fn cpus(stat: &str) -> BTreeMap<u32, Cpu> {
    let cpu = |(number, ticks): (Option<u32>, [u64; 8])| {
        let [_, _, _, idle, iowait, _, softirq, _] = ticks;
        Some((number?, Cpu { softirq, idle: idle + iowait, total: ticks.iter().sum() }))
    };
    machine::cpu_ticks(stat).filter_map(cpu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_library_and_of_programs_become_lanes() {
        let mut snapshot = Snapshot::default();
        snapshot.add(
            7,
            "echo",
            "manylane_lane_delivered_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"10\"} 5\n\
             manylane_lane_delivered_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"2\"} 6\n\
             manylane_lane_delivered_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"closed\"} 9\n\
             manylane_lane_sent_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"2\"} 4\n\
             manylane_lane_kernel_dropped_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"2\"} 3\n\
             manylane_lane_lost_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"2\"} 3\n\
             manylane_lane_queued_bytes{socket=\"[::]:53\",engine=\"xdp\",lane=\"2\"} 100\n\
             manylane_filter_dropped_total{socket=\"[::]:53\",engine=\"xdp\",reason=\"limited\"} 8\n",
        );
        snapshot.add(
            8,
            "manylane",
            "manylane_run_delivered_total{socket=\"0.0.0.0:9\",lane=\"\",pid=\"4000000000\",tid=\"90\"} 11\n\
             manylane_run_delivered_by_bypass_total{socket=\"0.0.0.0:9\",lane=\"\",pid=\"4000000000\",tid=\"90\"} 1\n\
             manylane_run_bad_frames_total{socket=\"0.0.0.0:9\",lane=\"\",pid=\"4000000000\",tid=\"90\"} 2\n\
             manylane_run_queued_bytes{socket=\"0.0.0.0:9\",lane=\"\",pid=\"4000000000\",tid=\"90\"} 50\n\
             manylane_run_queue_limit_bytes{socket=\"0.0.0.0:9\",lane=\"\",pid=\"4000000000\",tid=\"90\"} 200\n\
             manylane_run_kernel_dropped_total{socket=\"0.0.0.0:9\",lane=\"\",pid=\"4000000000\",tid=\"90\"} 4\n\
             manylane_run_ring_frames{socket=\"0.0.0.0:9\",device=\"eth0\",queue=\"1\"} 6\n\
             manylane_run_ring_entries{socket=\"0.0.0.0:9\",device=\"eth0\",queue=\"1\"} 2048\n\
             manylane_run_ring_dropped_total{socket=\"0.0.0.0:9\",device=\"eth0\",queue=\"1\"} 7\n\
             manylane_run_lanes 1\n",
        );
        let lanes: Vec<(&str, u64)> =
            snapshot.lanes.iter().map(|(key, lane)| (&*key.lane, lane.delivered)).collect();
        assert_eq!(lanes, [("2", 6), ("10", 5), ("-", 11)], "by number");
        let second = snapshot.lanes.values().next().unwrap();
        assert_eq!((second.sent, second.queued, second.queue_limit), (4, Some(100), None));
        assert_eq!(second.lost, BTreeMap::from([("kernel_dropped".into(), 3)]));
        let run = snapshot.lanes.values().last().unwrap();
        assert_eq!((run.program.as_str(), run.queued, run.queue_limit), ("manylane", Some(50), Some(200)));
        assert_eq!(run.lost, BTreeMap::from([("bad_frames".into(), 2), ("kernel_dropped".into(), 4)]));
        let key = ((8, "0.0.0.0:9".into(), "eth0".into()), 1);
        assert_eq!(snapshot.rings, BTreeMap::from([(key, Ring { frames: 6, entries: 2048, dropped: 7 })]));
        assert_eq!(snapshot.sockets.values().map(|socket| socket.limited).sum::<u64>(), 8);
    }

    #[test]
    fn the_page_of_a_program_takes_bounded_memory() {
        let mut snapshot = Snapshot::default();
        let socket = "x".repeat(1000);
        let line = |lane| format!("manylane_lane_sent_total{{socket=\"{socket}\",lane=\"{lane}\"}} 1\n");
        let page: String = (0..2 * ROWS_MAX).map(line).collect();
        // Families that follow add no rows either, but values of those that are there.
        let late = page.replace("_sent_", "_delivered_")
            + "manylane_filter_dropped_total{socket=\"a\",reason=\"limited\"} 8\n\
               manylane_run_ring_frames{socket=\"a\",device=\"eth0\",queue=\"1\"} 6\n\
               manylane_run_delivered_total{socket=\"a\",lane=\"\",pid=\"7\",tid=\"9\"} 1\n";
        snapshot.add(7, "hostile", &(page + &late));
        assert_eq!((snapshot.row_count(), snapshot.lanes.len()), (ROWS_MAX, ROWS_MAX));
        assert!(snapshot.lanes.values().all(|lane| (lane.sent, lane.delivered) == (1, 1)));
        assert!(snapshot.lanes.keys().all(|key| key.socket.len() <= 128));
        let notes: Vec<u32> = snapshot.silent.iter().map(|note| note.pid).collect();
        assert_eq!(notes, [7], "once");
        snapshot.add(8, "another", &line(0));
        assert_eq!((snapshot.row_count(), snapshot.silent.len()), (ROWS_MAX + 1, 1));
    }

    #[test]
    fn cpus_are_read() {
        let cpus = cpus("cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 40 5 6 70 8 0 0\ncpu1 1 2\nintr 5\n");
        assert_eq!(cpus, BTreeMap::from([(0, Cpu { softirq: 70, idle: 45, total: 135 })]));
    }
}
