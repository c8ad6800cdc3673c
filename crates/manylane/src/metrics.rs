//! Counters in the text form of Prometheus, for whoever serves them: the program, or
//! `metrics_port.rs` when asked for.

use std::fmt::{self, Write};
use std::os::fd::AsFd as _;

use manylane_sys::sock;

use crate::counters::{Count, LaneCounters, LaneId, NamedCounters};
use crate::lane::LaneShared;
use crate::socket::Handle;
use crate::wait::WaitPolicy;

impl Handle {
    /// Writes the counters of the socket in the text form of Prometheus (0.0.4): of each lane, and
    /// of those that were closed together, so that sums over them never go back. The names are in
    /// docs/operating.md.
    ///
    /// The page of several sockets is made by [`write_all_metrics`].
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_metrics(&self, out: &mut impl Write) -> fmt::Result {
        write_all_metrics(std::slice::from_ref(self), out)
    }
}

/// Writes the counters of several sockets as one page: see [`Handle::write_metrics`].
///
/// # Errors
/// Those of `out`.
pub fn write_all_metrics(handles: &[Handle], out: &mut impl Write) -> fmt::Result {
    let sockets: Vec<SocketSnapshot> = handles.iter().map(SocketSnapshot::new).collect();
    write_family(out, "manylane_lanes", "gauge")?;
    for socket in &sockets {
        writeln!(out, "manylane_lanes{{{}}} {}", socket.labels, socket.lanes)?;
    }
    write_family(out, "manylane_waiting", "gauge")?;
    for socket in &sockets {
        writeln!(out, "manylane_waiting{{{},policy=\"{}\"}} 1", socket.labels, socket.wait_policy)?;
    }
    for (at, (name, _)) in LaneCounters::default().named().into_iter().enumerate() {
        let name = format!("manylane_lane_{name}_total");
        let mut is_new = true;
        for socket in &sockets {
            for (lane, counters) in &socket.counters {
                let Some(value) = counters[at].1 else { continue };
                if std::mem::take(&mut is_new) {
                    write_family(out, &name, "counter")?;
                }
                writeln!(out, "{name}{{{},lane=\"{lane}\"}} {value}", socket.labels)?;
            }
        }
    }
    let gauges = ["queued_bytes", "queue_limit_bytes", "thread", "ring_frames", "ring_entries"];
    for (at, name) in gauges.into_iter().enumerate() {
        // Without engine xdp there are no rings.
        let is_there = |socket: &SocketSnapshot| socket.gauges.iter().any(|(_, values)| values[at].is_some());
        if sockets.iter().any(is_there) {
            write_family(out, &format!("manylane_lane_{name}"), "gauge")?;
        }
        for socket in &sockets {
            for (lane, values) in &socket.gauges {
                if let Some(value) = values[at] {
                    writeln!(out, "manylane_lane_{name}{{{},lane=\"{lane}\"}} {value}", socket.labels)?;
                }
            }
        }
    }
    write_family(out, "manylane_filter_dropped_total", "counter")?;
    for socket in &sockets {
        for (reason, count) in socket.filter_drops {
            writeln!(out, "manylane_filter_dropped_total{{{},reason=\"{reason}\"}} {count}", socket.labels)?;
        }
    }
    if sockets.iter().any(|socket| !socket.frames.is_empty()) {
        write_family(out, "manylane_xdp_frames_total", "counter")?;
    }
    for socket in &sockets {
        for (device, what, count) in &socket.frames {
            let (labels, device) = (&socket.labels, escape_label(device));
            writeln!(
                out,
                "manylane_xdp_frames_total{{{labels},device=\"{device}\",outcome=\"{what}\"}} {count}"
            )?;
        }
    }
    Ok(())
}

fn write_family(out: &mut impl Write, name: &str, kind: &str) -> fmt::Result {
    writeln!(out, "# TYPE {name} {kind}")
}

fn escape_label(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A socket at one moment.
struct SocketSnapshot {
    labels: String,
    lanes: usize,
    wait_policy: WaitPolicy,
    counters: Vec<(String, NamedCounters)>,
    gauges: Vec<(LaneId, [Option<i64>; 5])>,
    filter_drops: [(&'static str, u64); 2],
    frames: Vec<(String, &'static str, u64)>,
}

impl SocketSnapshot {
    fn new(handle: &Handle) -> Self {
        let all = handle.counters();
        let mut counters: Vec<_> =
            all.lanes.iter().map(|(id, lane)| (id.to_string(), lane.named())).collect();
        if all.closed != LaneCounters::default() {
            counters.push(("closed".into(), all.closed.named()));
        }
        let (address, engine) = handle.identity();
        Self {
            labels: format!("socket=\"{address}\",engine=\"{engine}\""),
            lanes: all.lanes.len(),
            wait_policy: handle.wait_policy(),
            counters,
            gauges: handle.lanes().iter().map(|lane| (lane.id, gauges(lane))).collect(),
            filter_drops: [("denied", all.filter_drops.denied), ("limited", all.filter_drops.limited)],
            frames: handle.xdp_counts(),
        }
    }
}

/// Memory that waits in the lane's queue, at which it is full, the thread that serves the lane, and
/// what waited in the receive rings of its devices' queues behind the last batch.
fn gauges(lane: &LaneShared) -> [Option<i64>; 5] {
    let queue = sock::queue_state(lane.fd.as_fd()).ok();
    let thread = Some(lane.thread()).filter(|tid| *tid != 0).map(i64::from);
    let entries = lane.cells.get(Count::RingEntries) as i64;
    let ring = (entries > 0).then(|| (lane.cells.get(Count::RingFrames) as i64, entries));
    [
        queue.map(|queue| queue.queued_bytes.into()),
        queue.map(|queue| queue.limit_bytes.into()),
        thread,
        ring.map(|(frames, _)| frames),
        ring.map(|(_, entries)| entries),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Builder, Engine};

    #[test]
    fn loopback_a_page_has_each_family_once_with_all_its_samples() {
        let open = || Builder::new("127.0.0.1:0").unwrap().lanes(2).engine(Engine::Mmsg).open().unwrap();
        let (one, two) = (open(), open());
        let mut page = String::new();
        write_all_metrics(&[one.handle(), two.handle()], &mut page).unwrap();
        let mut families: Vec<&str> = page.lines().filter(|line| line.starts_with('#')).collect();
        let count = families.len();
        families.sort_unstable();
        families.dedup();
        assert_eq!(families.len(), count, "{page}");
        for socket in [&one, &two] {
            let labels = format!("socket=\"{}\",engine=\"mmsg\"", socket.local_addr());
            for line in [
                format!("manylane_lanes{{{labels}}} 2"),
                format!("manylane_waiting{{{labels},policy=\"sleep\"}} 1"),
                format!("manylane_lane_delivered_total{{{labels},lane=\"1\"}} 0"),
                format!("manylane_lane_queued_bytes{{{labels},lane=\"0\"}} 0"),
                format!("manylane_filter_dropped_total{{{labels},reason=\"limited\"}} 0"),
            ] {
                assert!(page.lines().any(|there| there == line), "{line} is not in\n{page}");
            }
        }
        // Nothing serves them, nothing was closed, and there are no frames.
        assert!(
            !page.contains("_thread{")
                && !page.contains("_ring_")
                && !page.contains("closed")
                && !page.contains("xdp_frames"),
            "{page}"
        );
        assert_eq!(escape_label("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
