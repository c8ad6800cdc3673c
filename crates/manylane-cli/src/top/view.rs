//! The changes between two samples: rates and shares, sorted; as a table and as rows of JSON.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table, presets};
use manylane_measure::format_number;
use serde::Serialize;

use super::snapshot::{Cpu, Silent, Snapshot};
use super::tcp::TcpRow;

/// The changes of one lane.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) pid: u32,
    pub(super) program: String,
    pub(super) socket: String,
    pub(super) engine: String,
    pub(super) lane: String,
    pub(super) thread: Option<u32>,
    /// Since it was opened.
    pub(super) delivered: u64,
    pub(super) sent: u64,
    /// By reason.
    pub(super) lost: BTreeMap<String, u64>,
    /// Per second.
    pub(super) delivered_pps: f64,
    pub(super) sent_pps: f64,
    pub(super) lost_pps: f64,
    /// Memory used in the lane's kernel queue, and its limit.
    pub(super) queued_bytes: Option<u64>,
    pub(super) queue_limit_bytes: Option<u64>,
    /// Frames queued in the rings of its devices' queues after its last batch, and the size of the
    /// rings.
    pub(super) ring_frames: Option<u64>,
    pub(super) ring_entries: Option<u64>,
    /// Share of a CPU that its thread used.
    pub(super) cpu: Option<f64>,
    /// Connections of a lane of TCP, whose datagrams above are segments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tcp: Option<TcpRow>,
}

/// The drops of a socket's filter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct FilterRow {
    pub(super) pid: u32,
    pub(super) socket: String,
    pub(super) denied: u64,
    pub(super) limited: u64,
    pub(super) denied_pps: f64,
    pub(super) limited_pps: f64,
}

/// A queue of a device that is leased to a program under `manylane run`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RingRow {
    pub(super) pid: u32,
    pub(super) socket: String,
    pub(super) device: String,
    pub(super) queue: u32,
    /// Frames in its receive ring, and the size of the ring.
    pub(super) frames: u64,
    pub(super) entries: u64,
    /// Frames that found the ring full.
    pub(super) dropped: u64,
    pub(super) dropped_pps: f64,
}

/// Use of a CPU, as shares of the time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct CpuRow {
    pub(super) cpu: u32,
    pub(super) softirq: f64,
    pub(super) busy: f64,
}

/// The column that rows are sorted by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Sort {
    #[default]
    Lane,
    Delivered,
    Lost,
    Cpu,
}

impl Sort {
    pub(super) fn next(self) -> Self {
        match self {
            Self::Lane => Self::Delivered,
            Self::Delivered => Self::Lost,
            Self::Lost => Self::Cpu,
            Self::Cpu => Self::Lane,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Lane => "lane",
            Self::Delivered => "delivered",
            Self::Lost => "lost",
            Self::Cpu => "cpu",
        }
    }
}

/// The changes between two samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct View {
    /// Time between the two samples.
    pub(super) seconds: f64,
    /// Rates of lanes. They are the rows of the JSON document; its settings have the other fields.
    #[serde(skip)]
    pub(super) rows: Vec<Row>,
    pub(super) filter_drops: Vec<FilterRow>,
    /// Queues leased to programs under `manylane run`.
    pub(super) rings: Vec<RingRow>,
    pub(super) cpus: Vec<CpuRow>,
    pub(super) silent: Vec<Silent>,
}

impl View {
    /// From one sample to a later one. A lane that is new has no rates yet.
    pub(super) fn from_snapshots(before: &Snapshot, now: &Snapshot, seconds: f64) -> Self {
        let rate =
            |now: u64, then: Option<u64>| then.map_or(0.0, |then| now.saturating_sub(then) as f64 / seconds);
        let rows = now.lanes.iter().map(|(key, lane)| {
            let then = before.lanes.get(key);
            let lost = sum(lane.lost.values());
            let cpu = lane.cpu.map(|time| rate(time, then.and_then(|then| then.cpu)) / 1e9);
            Row {
                pid: key.pid,
                program: lane.program.clone(),
                socket: key.socket.clone(),
                engine: lane.engine.clone(),
                lane: key.lane.clone(),
                thread: lane.thread,
                delivered: lane.delivered,
                sent: lane.sent,
                lost: lane.lost.clone(),
                delivered_pps: rate(lane.delivered, then.map(|then| then.delivered)),
                sent_pps: rate(lane.sent, then.map(|then| then.sent)),
                lost_pps: rate(lost, then.map(|then| sum(then.lost.values()))),
                queued_bytes: lane.queued,
                queue_limit_bytes: lane.queue_limit,
                ring_frames: lane.ring_frames,
                ring_entries: lane.ring_entries,
                cpu,
                tcp: lane.tcp.as_ref().map(|tcp| tcp.row(then.and_then(|then| then.tcp.as_ref()), rate)),
            }
        });
        let drops = now.sockets.iter().filter(|(_, socket)| socket.denied > 0 || socket.limited > 0);
        let drops = drops.map(|(key, socket)| {
            let then = before.sockets.get(key);
            FilterRow {
                pid: key.0,
                socket: key.1.clone(),
                denied: socket.denied,
                limited: socket.limited,
                denied_pps: rate(socket.denied, then.map(|then| then.denied)),
                limited_pps: rate(socket.limited, then.map(|then| then.limited)),
            }
        });
        let rings = now.rings.iter().map(|(key, ring)| {
            let ((pid, socket, device), queue) = key;
            let then = before.rings.get(key).map(|then| then.dropped);
            RingRow {
                pid: *pid,
                socket: socket.clone(),
                device: device.clone(),
                queue: *queue,
                frames: ring.frames,
                entries: ring.entries,
                dropped: ring.dropped,
                dropped_pps: rate(ring.dropped, then),
            }
        });
        let cpus = now.cpus.iter().map(|(cpu, ticks)| {
            let then = before.cpus.get(cpu).copied().unwrap_or_default();
            let since = |field: fn(&Cpu) -> u64| field(ticks).saturating_sub(field(&then)) as f64;
            let all = since(|cpu| cpu.total).max(1.0);
            let busy = (all - since(|cpu| cpu.idle)).max(0.0) / all;
            CpuRow { cpu: *cpu, softirq: since(|cpu| cpu.softirq) / all, busy }
        });
        Self {
            seconds,
            rows: rows.collect(),
            filter_drops: drops.collect(),
            rings: rings.collect(),
            cpus: cpus.collect(),
            silent: now.silent.clone(),
        }
    }

    pub(super) fn sort(&mut self, by: Sort) {
        let descending = |a: f64, b: f64| b.partial_cmp(&a).unwrap_or(Ordering::Equal);
        // The sort is stable: equal rows stay in the order of lanes.
        self.rows.sort_by(|a, b| match by {
            Sort::Lane => Ordering::Equal,
            Sort::Delivered => descending(a.delivered_pps, b.delivered_pps),
            Sort::Lost => descending(a.lost_pps, b.lost_pps),
            Sort::Cpu => descending(a.cpu.unwrap_or(0.0), b.cpu.unwrap_or(0.0)),
        });
    }

    /// The text form: a few tables.
    pub(super) fn text(&self, rows_max: usize) -> String {
        let mut text = String::new();
        if self.rows.is_empty() {
            text.push_str(NO_LANES_MESSAGE);
            text.push('\n');
        } else {
            let mut table = Table::new();
            table.load_style(presets::NOTHING);
            table.set_header(TABLE_HEADER);
            for row in self.rows.iter().take(rows_max) {
                table.add_row(row.cells());
            }
            for column in table.column_iter_mut().skip(2) {
                column.set_cell_alignment(CellAlignment::Right);
            }
            text += &format!("{table}\n");
            if self.rows.len() > rows_max {
                text += &format!("and {} more (--rows)\n", self.rows.len() - rows_max);
            }
        }
        for line in self.rows.iter().take(rows_max).filter_map(Row::connections) {
            text += &format!("{line}\n");
        }
        for row in self.rows.iter().filter(|row| !row.lost.is_empty()) {
            text +=
                &format!("lost since it was opened, {} lane {}: {}\n", row.socket, row.lane, row.losses());
        }
        for line in self.ring_lines() {
            text += &format!("{line}\n");
        }
        for one in &self.filter_drops {
            text += &format!("{}\n", one.line());
        }
        for Silent { why, .. } in &self.silent {
            text += &format!("{why}\n");
        }
        text + &format!("softirq: {}\n", self.cpus_line())
    }

    /// The leased queues, one line for each socket: the fullest of their rings, and the frames
    /// that found it full.
    pub(super) fn ring_lines(&self) -> Vec<String> {
        let mut sockets: BTreeMap<(u32, &str), Vec<&RingRow>> = BTreeMap::new();
        for ring in &self.rings {
            sockets.entry((ring.pid, &ring.socket)).or_default().push(ring);
        }
        let share = |ring: &RingRow| ring.frames as f64 / ring.entries.max(1) as f64;
        let line = |((_, socket), rings): ((u32, &str), Vec<&RingRow>)| {
            let fullest = rings.iter().copied().max_by(|a, b| share(a).total_cmp(&share(b)))?;
            let dropped = sum(rings.iter().map(|ring| &ring.dropped));
            let rate: f64 = rings.iter().map(|ring| ring.dropped_pps).sum();
            Some(format!(
                "rings of {socket}: {}, fullest {} queue {} {}, dropped {dropped} ({}/s)",
                rings.len(),
                fullest.device,
                fullest.queue,
                percent(share(fullest)),
                format_number(rate.round())
            ))
        };
        sockets.into_iter().filter_map(line).collect()
    }

    /// Share of softirqs by CPU.
    pub(super) fn cpus_line(&self) -> String {
        self.cpus.iter().map(CpuRow::text).collect::<Vec<_>>().join(", ")
    }

    /// The same in a limited number of lines and columns: if there is no room for all CPUs, those
    /// with the largest shares.
    pub(super) fn fit_cpus(&self, width: usize, lines: usize) -> String {
        let all = self.cpus_line();
        // A CPU's text is not split, so that columns stay empty at the end of a line.
        let room = width.saturating_sub("CPU 123 100%, ".len()) * lines;
        if all.chars().count() <= room {
            return all;
        }
        let mut cpus: Vec<&CpuRow> = self.cpus.iter().collect();
        cpus.sort_by(|a, b| b.softirq.total_cmp(&a.softirq));
        let mut text = String::new();
        for (at, cpu) in cpus.iter().enumerate() {
            let rest = format!("and {} more, max {}", cpus.len() - at, percent(cpu.softirq));
            let next = format!("{}, ", cpu.text());
            if text.len() + next.len() + rest.len() > room {
                return text + &rest;
            }
            text += &next;
        }
        all
    }
}

/// The text if there are no lanes.
pub(super) const NO_LANES_MESSAGE: &str = "no process with lanes in this network namespace: start 'manylane echo', 'manylane proxy', 'manylane run', or a program with manylane::control";

/// The columns.
pub(super) const TABLE_HEADER: [&str; 8] =
    ["process", "socket", "lane", "in/s", "out/s", "queue", "lost/s", "cpu"];

impl CpuRow {
    fn text(&self) -> String {
        format!("CPU {} {}", self.cpu, percent(self.softirq))
    }
}

impl Row {
    pub(super) fn cells(&self) -> [String; 8] {
        let share = |there: Option<u64>, room: Option<u64>| match (there, room) {
            (Some(there), Some(room @ 1..)) => Some(there as f64 / room as f64),
            _ => None,
        };
        // The fuller queue is the one that drops first.
        let kernel = share(self.queued_bytes, self.queue_limit_bytes);
        let rings = share(self.ring_frames, self.ring_entries);
        let buffers =
            self.tcp.as_ref().and_then(|tcp| share(Some(tcp.memory_used_bytes), Some(tcp.memory_max_bytes)));
        let has_packets = self.tcp.as_ref().is_none_or(TcpRow::has_segments);
        let packets = |rate: f64| if has_packets { format_number(rate.round()) } else { "-".into() };
        let queue = [kernel, rings, buffers].into_iter().flatten().reduce(f64::max);
        let queue = queue.map_or_else(|| "-".into(), percent);
        [
            format!("{} {}", self.pid, self.program),
            self.socket.clone(),
            self.lane.clone(),
            packets(self.delivered_pps),
            packets(self.sent_pps),
            queue,
            format_number(self.lost_pps.round()),
            self.cpu.map_or_else(|| "-".into(), percent),
        ]
    }

    /// A line on its connections, if it is of TCP.
    pub(super) fn connections(&self) -> Option<String> {
        let Row { socket, lane, tcp, .. } = self;
        tcp.as_ref().map(|tcp| format!("connections of {socket} lane {lane}: {}", tcp.text()))
    }

    /// Losses by reason.
    pub(super) fn losses(&self) -> String {
        let all: Vec<String> = self.lost.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        if all.is_empty() { "nothing".into() } else { all.join(", ") }
    }
}

impl FilterRow {
    pub(super) fn line(&self) -> String {
        let socket =
            if self.socket.is_empty() { format!("process {}", self.pid) } else { self.socket.clone() };
        format!(
            "filter of {socket}: denied {} ({}/s), over a limit {} ({}/s)",
            self.denied,
            format_number(self.denied_pps.round()),
            self.limited,
            format_number(self.limited_pps.round())
        )
    }
}

/// The numbers come from another process, so their sum must not overflow.
fn sum<'a>(of: impl Iterator<Item = &'a u64>) -> u64 {
    of.fold(0, |sum, one| sum.saturating_add(*one))
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::snapshot::Ring;
    use super::*;

    const PAGE: &str = "manylane_lane_delivered_total{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} DELIVERED\n\
        manylane_lane_sent_total{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} 100\n\
        manylane_lane_kernel_dropped_total{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} LOST\n\
        manylane_lane_queued_bytes{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} 50\n\
        manylane_lane_queue_limit_bytes{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} 200\n\
        manylane_lane_delivered_total{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"1\"} 7\n\
        manylane_lane_ring_frames{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"1\"} 1024\n\
        manylane_lane_ring_entries{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"1\"} 2048\n\
        manylane_lane_ring_frames{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} 20\n\
        manylane_lane_ring_entries{socket=\"192.0.2.1:53\",engine=\"xdp\",lane=\"0\"} 2048\n\
        manylane_filter_dropped_total{socket=\"192.0.2.1:53\",engine=\"xdp\",reason=\"limited\"} DELIVERED\n";

    /// Two lanes over two seconds; one got 1000 datagrams per second and lost 20.
    pub(in crate::top) fn view() -> View {
        let snap = |delivered: &str, lost: &str, softirq, cpu| {
            let mut snap = Snapshot::default();
            snap.add(4242, "echo", &PAGE.replace("DELIVERED", delivered).replace("LOST", lost));
            snap.cpus.insert(0, Cpu { softirq, idle: 100, total: 100 + 2 * softirq });
            snap.cpus.insert(1, Cpu { softirq: 0, idle: 100 + 2 * softirq, total: 100 + 2 * softirq });
            snap.lanes.values_mut().next().unwrap().cpu = Some(cpu);
            for (queue, frames) in [(0, 10), (1, 512)] {
                let key = ((4242, "192.0.2.1:53".into(), "eth0".into()), queue);
                snap.rings.insert(key, Ring { frames, entries: 2048, dropped: lost.parse().unwrap() });
            }
            snap
        };
        View::from_snapshots(&snap("500", "0", 0, 0), &snap("2500", "40", 50, 1_000_000_000), 2.0)
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let mut view = view();
        let row = &view.rows[0];
        assert_eq!((row.delivered_pps, row.sent_pps, row.lost_pps, row.cpu), (1000.0, 0.0, 20.0, Some(0.5)));
        assert_eq!((row.delivered, row.losses().as_str()), (2500, "kernel_dropped 40"));
        assert_eq!(row.cells()[3..], ["1000", "0", "25%", "20", "50%"].map(String::from));
        assert_eq!(view.rows[1].cells()[5], "50%", "of its rings");
        assert_eq!((view.cpus[0].softirq, view.cpus[0].busy, view.cpus[1].busy), (0.5, 1.0, 0.0));
        assert_eq!((view.filter_drops[0].limited, view.filter_drops[0].limited_pps), (2500, 1000.0));
        let text = view.text(1);
        for hint in [
            "rings of 192.0.2.1:53: 2, fullest eth0 queue 1 25%, dropped 80 (40/s)",
            "4242 echo",
            "and 1 more",
            "kernel_dropped 40",
            "over a limit 2500 (1000/s)",
            "CPU 0 50%",
        ] {
            assert!(text.contains(hint), "{hint} is not in\n{text}");
        }
        view.rows.reverse();
        view.sort(Sort::Lane);
        assert_eq!(view.rows[0].lane, "1");
        view.sort(Sort::Cpu);
        assert_eq!(view.rows[0].lane, "0");
        assert!(View::default().text(9).contains("no process with lanes"));
        let four = Sort::Lane.next().next().next();
        assert_eq!((four, four.next()), (Sort::Cpu, Sort::Lane));
    }

    #[test]
    fn new_threads_have_no_rates_yet() {
        let mut snap = Snapshot::default();
        snap.add(1, "x", PAGE.replace("DELIVERED", "9").replace("LOST", "9").as_str());
        let view = View::from_snapshots(&Snapshot::default(), &snap, 1.0);
        assert!(view.rows.iter().all(|row| row.delivered_pps == 0.0 && row.lost_pps == 0.0));
        assert_eq!(View::from_snapshots(&snap, &Snapshot::default(), 1.0).rows, []);
    }
}
