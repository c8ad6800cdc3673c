//! Counters in the text format of Prometheus (0.0.4), for programs that serve them and for
//! `metrics_port.rs`.

use std::fmt::{self, Display, Write};
use std::os::fd::AsFd as _;

use manylane_sys::sock;

use crate::counters::{Count, LaneCounters};
use crate::lane_shared::LaneShared;
use crate::socket::Handle;

/// A page of metrics. Samples of one family are grouped, as the format requires, in whichever
/// order they are added.
#[derive(Clone, Debug, Default)]
pub struct MetricsPage {
    families: Vec<Family>,
}

#[derive(Clone, Debug)]
struct Family {
    name: String,
    kind: &'static str,
    help: &'static str,
    samples: Vec<String>,
}

impl MetricsPage {
    /// Adds a sample of the family `name` with this `kind` (`counter` or `gauge`).
    pub fn add(&mut self, name: &str, kind: &'static str, labels: &[(&str, &str)], value: u64) {
        let mut sample = name.to_owned();
        let mut separator = '{';
        for (label, text) in labels {
            // Writing to a string does not fail.
            _ = write!(sample, "{separator}{label}=\"{}\"", escape_label(text));
            separator = ',';
        }
        _ = write!(sample, "{} {value}", if labels.is_empty() { "" } else { "}" });
        match self.family(name) {
            Some(family) => family.samples.push(sample),
            None => self.families.push(Family { name: name.into(), kind, help: "", samples: vec![sample] }),
        }
    }

    /// Sets the help of the family `name`, one line. A family without samples is not on the page.
    pub fn describe(&mut self, name: &str, help: &'static str) {
        if let Some(family) = self.family(name) {
            family.help = help;
        }
    }

    fn family(&mut self, name: &str) -> Option<&mut Family> {
        self.families.iter_mut().find(|family| family.name == name)
    }
}

impl Display for MetricsPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Family { name, kind, help, samples } in &self.families {
            if !help.is_empty() {
                writeln!(f, "# HELP {name} {help}")?;
            }
            writeln!(f, "# TYPE {name} {kind}")?;
            for sample in samples {
                writeln!(f, "{sample}")?;
            }
        }
        Ok(())
    }
}

fn escape_label(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Handle {
    /// Writes the counters of the socket in the text format of Prometheus (0.0.4): of each open
    /// lane, and the sum over closed ones, so that sums never decrease. docs/operating.md lists
    /// the names.
    ///
    /// [`write_all_metrics`] makes the page of several sockets.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_metrics(&self, out: &mut impl Write) -> fmt::Result {
        write_all_metrics(std::slice::from_ref(self), out)
    }

    /// The page of [`write_metrics`](Self::write_metrics), as a string.
    pub(crate) fn metrics_page(&self) -> String {
        let mut page = MetricsPage::default();
        add_socket(&mut page, self);
        page.to_string()
    }
}

/// Writes the counters of several sockets as one page: see [`Handle::write_metrics`].
///
/// # Errors
/// Those of `out`.
pub fn write_all_metrics(handles: &[Handle], out: &mut impl Write) -> fmt::Result {
    let mut page = MetricsPage::default();
    handles.iter().for_each(|handle| add_socket(&mut page, handle));
    write!(out, "{page}")
}

fn add_socket(page: &mut MetricsPage, handle: &Handle) {
    let counters = handle.counters();
    let (address, engine) = handle.identity();
    let (address, engine) = (address.to_string(), engine.to_string());
    let (socket, engine) = (("socket", address.as_str()), ("engine", engine.as_str()));
    page.add("manylane_lanes", "gauge", &[socket, engine], counters.lanes.len() as u64);
    let policy = handle.wait_policy().to_string();
    page.add("manylane_waiting", "gauge", &[socket, engine, ("policy", &policy)], 1);
    let closed = (counters.closed != LaneCounters::default()).then(|| ("closed".into(), counters.closed));
    let lanes = counters.lanes.iter().map(|(id, lane)| (id.to_string(), *lane));
    for (id, lane) in lanes.chain(closed) {
        for (name, value) in lane.named().into_iter().filter_map(|(name, value)| Some((name, value?))) {
            let name = format!("manylane_lane_{name}_total");
            page.add(&name, "counter", &[socket, engine, ("lane", &id)], value);
        }
    }
    for lane in handle.lanes() {
        let id = lane.id.to_string();
        for (name, value) in gauges(&lane).into_iter().filter_map(|(name, value)| Some((name, value?))) {
            page.add(&format!("manylane_lane_{name}"), "gauge", &[socket, engine, ("lane", &id)], value);
        }
    }
    let drops = counters.filter_drops;
    for (reason, count) in [("denied", drops.denied), ("limited", drops.limited)] {
        let labels = [socket, engine, ("reason", reason)];
        page.add("manylane_filter_dropped_total", "counter", &labels, count);
    }
    for (device, outcome, count) in handle.frame_counts() {
        let labels = [socket, engine, ("device", &device), ("outcome", outcome)];
        page.add("manylane_device_frames_total", "counter", &labels, count);
    }
    for counter in LaneCounters::TABLE {
        page.describe(&format!("manylane_lane_{}_total", counter.name), counter.doc());
    }
    for (name, help) in HELP {
        page.describe(name, help);
    }
}

/// Help of the families that are not [`LaneCounters`].
const HELP: [(&str, &str); 9] = [
    ("manylane_lanes", "Open lanes."),
    ("manylane_waiting", "1, with the policy by which lanes wait."),
    ("manylane_lane_queued_bytes", "Memory queued in the lane's kernel socket."),
    ("manylane_lane_queue_limit_bytes", "Memory at which the kernel socket drops."),
    ("manylane_lane_thread", "Id of the thread that serves the lane."),
    ("manylane_lane_ring_frames", "Frames in the receive rings of the lane's queues after its last batch."),
    ("manylane_lane_ring_entries", "Entries of the receive rings of the lane's queues."),
    ("manylane_filter_dropped_total", "Datagrams that the filter dropped."),
    ("manylane_device_frames_total", "Frames by what the XDP program of the device did with them."),
];

/// Bytes queued in the lane's kernel socket, the number of bytes at which it drops, the thread
/// that serves the lane, and the frames and entries of the receive rings of its queues after the
/// last batch. Not every engine has such rings.
fn gauges(lane: &LaneShared) -> [(&'static str, Option<u64>); 5] {
    let queue = sock::queue_state(lane.fd.as_fd()).ok();
    let thread = u64::try_from(lane.thread()).ok().filter(|tid| *tid != 0);
    let entries = Some(lane.cells.get(Count::RingEntries)).filter(|entries| *entries > 0);
    [
        ("queued_bytes", queue.map(|queue| queue.queued_bytes.into())),
        ("queue_limit_bytes", queue.map(|queue| queue.limit_bytes.into())),
        ("thread", thread),
        ("ring_frames", entries.map(|_| lane.cells.get(Count::RingFrames))),
        ("ring_entries", entries),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Builder;

    #[test]
    fn the_metrics_page_is_valid_prometheus_text() {
        let mut page = MetricsPage::default();
        page.add("manylane_lanes", "gauge", &[("socket", "a\"b\\c\nd")], 2);
        page.add("manylane_sent_total", "counter", &[("lane", "0")], 5);
        page.add("manylane_pages_total", "counter", &[], 1);
        page.add("manylane_sent_total", "counter", &[("lane", "1")], 7);
        page.describe("manylane_sent_total", "Datagrams sent.");
        assert_eq!(
            page.to_string(),
            "# TYPE manylane_lanes gauge\n\
             manylane_lanes{socket=\"a\\\"b\\\\c\\nd\"} 2\n\
             # HELP manylane_sent_total Datagrams sent.\n\
             # TYPE manylane_sent_total counter\n\
             manylane_sent_total{lane=\"0\"} 5\n\
             manylane_sent_total{lane=\"1\"} 7\n\
             # TYPE manylane_pages_total counter\n\
             manylane_pages_total 1\n"
        );
    }

    #[test]
    fn loopback_a_page_has_each_family_once_with_all_its_samples() {
        let open = || Builder::new("127.0.0.1:0").unwrap().lanes(2).open().unwrap();
        let (one, two) = (open(), open());
        let mut page = String::new();
        write_all_metrics(&[one.handle(), two.handle()], &mut page).unwrap();
        let mut families: Vec<&str> = page.lines().filter(|line| line.starts_with('#')).collect();
        let count = families.len();
        // Each family has both lines.
        assert_eq!(page.matches("# HELP ").count() * 2, count, "{page}");
        families.sort_unstable();
        families.dedup();
        assert_eq!(families.len(), count, "{page}");
        for socket in [&one, &two] {
            let labels = format!("socket=\"{}\",engine=\"{}\"", socket.local_addr(), socket.engine());
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
        // No thread, no closed lane, no frames.
        assert!(
            !page.contains("_thread{")
                && !page.contains("_ring_")
                && !page.contains("lane=\"closed\"")
                && !page.contains("device_frames"),
            "{page}"
        );
    }
}
