//! Counters in the text format of Prometheus (0.0.4), for programs that serve them and for
//! `metrics_port.rs`.

use std::fmt::{self, Display, Write};
use std::os::fd::AsFd as _;

use manylane_sys::sock;

use crate::counters::{Count, Counters, LaneCounters, LaneId};
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
    /// Adds a sample of the family `name`. The family has the `kind` (`counter` or `gauge`) and the
    /// `help`, one line, of its first sample.
    pub fn add(
        &mut self,
        name: &str,
        kind: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: u64,
    ) {
        let mut sample = name.to_owned();
        let mut separator = '{';
        for (label, text) in labels {
            // Writing to a string does not fail.
            _ = write!(sample, "{separator}{label}=\"{}\"", escape_label(text));
            separator = ',';
        }
        _ = write!(sample, "{} {value}", if labels.is_empty() { "" } else { "}" });
        match self.families.iter_mut().find(|family| family.name == name) {
            Some(family) => family.samples.push(sample),
            None => self.families.push(Family { name: name.into(), kind, help, samples: vec![sample] }),
        }
    }
}

impl Display for MetricsPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Family { name, kind, help, samples } in &self.families {
            writeln!(f, "# HELP {name} {help}\n# TYPE {name} {kind}")?;
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
        SocketMetrics::read(self).add_to(&mut page);
        page.to_string()
    }
}

/// Writes the counters of several sockets as one page: see [`Handle::write_metrics`].
///
/// # Errors
/// Those of `out`.
pub fn write_all_metrics(handles: &[Handle], out: &mut impl Write) -> fmt::Result {
    let mut page = MetricsPage::default();
    handles.iter().for_each(|handle| SocketMetrics::read(handle).add_to(&mut page));
    write!(out, "{page}")
}

/// What the metrics of a socket are made of.
struct SocketMetrics {
    address: String,
    engine: String,
    policy: String,
    counters: Counters,
    gauges: Vec<(LaneId, [Gauge; 5])>,
    frames: Vec<(String, &'static str, u64)>,
}

/// Name, help and value of a gauge of a lane.
type Gauge = (&'static str, &'static str, Option<u64>);

impl SocketMetrics {
    fn read(handle: &Handle) -> Self {
        let (address, engine) = handle.identity();
        Self {
            address: address.to_string(),
            engine: engine.to_string(),
            policy: handle.wait_policy().to_string(),
            counters: handle.counters(),
            gauges: handle.lanes().iter().map(|lane| (lane.id, gauges(lane))).collect(),
            frames: handle.frame_counts(),
        }
    }

    fn add_to(&self, page: &mut MetricsPage) {
        let Self { address, engine, policy, counters, gauges, frames } = self;
        let (socket, engine) = (("socket", address.as_str()), ("engine", engine.as_str()));
        let labels = [socket, engine];
        page.add("manylane_lanes", "gauge", "Open lanes.", &labels, counters.lanes.len() as u64);
        let labels = [socket, engine, ("policy", policy)];
        page.add("manylane_waiting", "gauge", "1, with the policy by which lanes wait.", &labels, 1);
        let closed = (counters.closed != LaneCounters::default()).then(|| ("closed".into(), counters.closed));
        let lanes = counters.lanes.iter().map(|(id, lane)| (id.to_string(), *lane));
        for (id, lane) in lanes.chain(closed) {
            for counter in LaneCounters::TABLE {
                let Some(value) = (counter.value)(&lane) else { continue };
                let name = format!("manylane_lane_{}_total", counter.name);
                page.add(&name, "counter", counter.doc(), &[socket, engine, ("lane", &id)], value);
            }
        }
        for (id, gauges) in gauges {
            let id = id.to_string();
            for &(name, help, value) in gauges {
                let Some(value) = value else { continue };
                page.add(name, "gauge", help, &[socket, engine, ("lane", &id)], value);
            }
        }
        let drops = counters.filter_drops;
        for (reason, count) in [("denied", drops.denied), ("limited", drops.limited)] {
            let labels = [socket, engine, ("reason", reason)];
            let help = "Datagrams that the filter dropped.";
            page.add("manylane_filter_dropped_total", "counter", help, &labels, count);
        }
        for (device, outcome, count) in frames {
            let labels = [socket, engine, ("device", device), ("outcome", outcome)];
            let help = "Frames by what the XDP program of the device did with them.";
            page.add("manylane_device_frames_total", "counter", help, &labels, *count);
        }
    }
}

fn gauges(lane: &LaneShared) -> [Gauge; 5] {
    let queue = sock::queue_state(lane.fd.as_fd()).ok();
    let thread = u64::try_from(lane.thread()).ok().filter(|tid| *tid != 0);
    // Not every engine has rings.
    let entries = Some(lane.cells.get(Count::RingEntries)).filter(|entries| *entries > 0);
    [
        (
            "manylane_lane_queued_bytes",
            "Memory queued in the lane's kernel socket.",
            queue.map(|queue| queue.queued_bytes.into()),
        ),
        (
            "manylane_lane_queue_limit_bytes",
            "Memory at which the kernel socket drops.",
            queue.map(|queue| queue.limit_bytes.into()),
        ),
        ("manylane_lane_thread", "Id of the thread that serves the lane.", thread),
        (
            "manylane_lane_ring_frames",
            "Frames in the receive rings of the lane's queues after its last batch.",
            entries.map(|_| lane.cells.get(Count::RingFrames)),
        ),
        ("manylane_lane_ring_entries", "Entries of the receive rings of the lane's queues.", entries),
    ]
}

#[cfg(test)]
mod tests {
    use manylane_test_support::docs::{check_table, metrics_rows};

    use super::*;
    use crate::config::Builder;

    #[test]
    fn the_metrics_page_is_valid_prometheus_text() {
        let mut page = MetricsPage::default();
        page.add("manylane_lanes", "gauge", "Open lanes.", &[("socket", "a\"b\\c\nd")], 2);
        page.add("manylane_sent_total", "counter", "Datagrams sent.", &[("lane", "0")], 5);
        page.add("manylane_pages_total", "counter", "Pages served.", &[], 1);
        page.add("manylane_sent_total", "counter", "Datagrams sent.", &[("lane", "1")], 7);
        assert_eq!(
            page.to_string(),
            "# HELP manylane_lanes Open lanes.\n\
             # TYPE manylane_lanes gauge\n\
             manylane_lanes{socket=\"a\\\"b\\\\c\\nd\"} 2\n\
             # HELP manylane_sent_total Datagrams sent.\n\
             # TYPE manylane_sent_total counter\n\
             manylane_sent_total{lane=\"0\"} 5\n\
             manylane_sent_total{lane=\"1\"} 7\n\
             # HELP manylane_pages_total Pages served.\n\
             # TYPE manylane_pages_total counter\n\
             manylane_pages_total 1\n"
        );
    }

    #[test]
    fn loopback_operating_docs_list_the_metrics_of_a_socket() {
        let socket = Builder::new("127.0.0.1:0").unwrap().lanes(1).open().unwrap();
        let mut metrics = SocketMetrics::read(&socket.handle());
        // The tables of counters list them.
        metrics.counters.lanes.clear();
        // Without a thread, a device and its queues, these have no values.
        metrics.gauges.iter_mut().flat_map(|(_, gauges)| gauges).for_each(|gauge| gauge.2 = Some(0));
        metrics.frames = vec![("eth0".into(), "redirected", 0)];
        let mut page = MetricsPage::default();
        metrics.add_to(&mut page);
        let rows = metrics_rows(&page.to_string());
        check_table("operating.md", "metrics of a socket", ["family", "value", "labels"], rows);
    }

    #[test]
    fn loopback_a_page_has_each_family_once_with_all_its_samples() {
        let open = || Builder::new("127.0.0.1:0").unwrap().lanes(2).open().unwrap();
        let (one, two) = (open(), open());
        let mut page = String::new();
        write_all_metrics(&[one.handle(), two.handle()], &mut page).unwrap();
        let mut families: Vec<&str> = page.lines().filter(|line| line.starts_with('#')).collect();
        let count = families.len();
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
