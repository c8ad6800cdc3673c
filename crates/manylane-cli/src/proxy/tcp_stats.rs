//! What lanes of TCP have counted: for Prometheus and `manylane top`, and for the document.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;

use manylane::FilterHandle;
use manylane_proxy::{Counters, LaneCounters, StackStats};
use serde_json::{Map, Value};

/// The counters of one lane.
pub(super) struct LaneStats {
    pub(super) counters: Arc<LaneCounters>,
    pub(super) stack: Arc<StackStats>,
}

/// Those of all lanes.
pub(super) struct TcpStats {
    /// The addresses that are listened on, as a label.
    socket: String,
    stack: &'static str,
    lanes: Vec<LaneStats>,
    filter: Option<FilterHandle>,
}

/// A value of a lane: the name of its family, and its kind.
type Sample = (String, &'static str, u64);

impl TcpStats {
    pub(super) fn new(
        listen: &[SocketAddr],
        stack: &'static str,
        lanes: Vec<LaneStats>,
        filter: Option<FilterHandle>,
    ) -> TcpStats {
        let socket = listen.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
        TcpStats { socket, stack, lanes, filter }
    }

    /// The sums of all lanes.
    pub(super) fn total(&self) -> Counters {
        let mut total = Counters::default();
        self.lanes.iter().for_each(|lane| total.add(&lane.counters.snapshot()));
        total
    }

    /// The text format of Prometheus.
    pub(super) fn page(&self) -> String {
        let TcpStats { socket, stack, .. } = self;
        let lanes: Vec<Vec<Sample>> = self.lanes.iter().map(LaneStats::samples).collect();
        let mut text = String::new();
        // Lanes of one stack have the same families in the same order.
        for at in 0..lanes.first().map_or(0, Vec::len) {
            for (number, lane) in lanes.iter().enumerate() {
                let Some((name, kind, value)) = lane.get(at) else { continue };
                // Writing to a string does not fail.
                if number == 0 {
                    _ = writeln!(text, "# TYPE {name} {kind}");
                }
                let labels = format!("socket=\"{socket}\",stack=\"{stack}\",lane=\"{number}\"");
                _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        }
        if let Some(drops) = self.filter.as_ref().map(FilterHandle::drops) {
            text.push_str("# TYPE manylane_filter_dropped_total counter\n");
            for (reason, count) in [("denied", drops.denied), ("limited", drops.limited)] {
                let labels = format!("socket=\"{socket}\",engine=\"xdp\",reason=\"{reason}\"");
                _ = writeln!(text, "manylane_filter_dropped_total{{{labels}}} {count}");
            }
        }
        text
    }

    /// An object for each lane.
    pub(super) fn json(&self) -> Vec<Value> {
        let object = |pairs: &mut dyn Iterator<Item = (&'static str, u64)>| -> Map<String, Value> {
            pairs.map(|(name, value)| (name.to_owned(), value.into())).collect()
        };
        let lane = |(number, lane): (usize, &LaneStats)| {
            let mut row = Map::from_iter([("lane".to_owned(), Value::from(number))]);
            row.extend(object(&mut lane.counters.snapshot().iter()));
            let stack = object(&mut lane.stack.iter().map(|stat| (stat.name, stat.value)));
            row.insert("stack".into(), stack.into());
            Value::from(row)
        };
        self.lanes.iter().enumerate().map(lane).collect()
    }
}

impl LaneStats {
    fn samples(&self) -> Vec<Sample> {
        let sample = |prefix: &str, name: &str, is_level: bool, value: u64| match is_level {
            true => (format!("manylane_proxy_{prefix}_{name}"), "gauge", value),
            false => (format!("manylane_proxy_{prefix}_{name}_total"), "counter", value),
        };
        let own = self.counters.snapshot();
        let own = own.iter().map(|(name, value)| sample("lane", name, name == "open", value));
        let stack = self.stack.iter().map(|stat| sample("stack", stat.name, stat.is_level, stat.value));
        let thread = sample("lane", "thread", true, self.stack.thread().unwrap_or(0));
        own.chain(stack).chain([thread]).collect()
    }
}
