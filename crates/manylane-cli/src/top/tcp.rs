//! What lanes of TCP have beside packets: connections, and the bytes that a proxy moves.

use manylane_measure::format_number;
use serde::Serialize;

/// Counters and levels of a lane of TCP.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TcpCounts {
    open: u64,
    accepted: u64,
    bytes_to_servers: u64,
    bytes_to_clients: u64,
    /// None on kernel sockets, of which only the kernel knows the segments.
    retransmitted: Option<u64>,
    memory_used: u64,
    memory_max: u64,
}

/// Their changes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct TcpRow {
    pub(super) open: u64,
    /// Since the start.
    pub(super) accepted: u64,
    pub(super) bytes_to_servers: u64,
    pub(super) bytes_to_clients: u64,
    pub(super) retransmitted: Option<u64>,
    /// Per second.
    pub(super) accepted_ps: f64,
    pub(super) bytes_to_servers_ps: f64,
    pub(super) bytes_to_clients_ps: f64,
    pub(super) retransmitted_ps: Option<f64>,
    /// Of buffered payload.
    pub(super) memory_used_bytes: u64,
    pub(super) memory_max_bytes: u64,
}

/// True for a counter of segments that reached no connection, or did not leave.
pub(super) fn is_loss(counter: &str) -> bool {
    counter.starts_with("dropped_")
        || matches!(counter, "malformed" | "unsent" | "unresolved" | "handover_full" | "xsk_dropped")
}

impl TcpCounts {
    /// Sets a value, by the name of its family behind `manylane_proxy_`.
    pub(super) fn set(&mut self, name: &str, value: u64) {
        match name {
            "lane_open" => self.open = value,
            "lane_accepted" => self.accepted = value,
            "lane_bytes_to_servers" => self.bytes_to_servers = value,
            "lane_bytes_to_clients" => self.bytes_to_clients = value,
            "stack_retransmitted" => self.retransmitted = Some(value),
            "stack_memory_used_bytes" => self.memory_used = value,
            "stack_memory_max_bytes" => self.memory_max = value,
            _ => {}
        }
    }

    /// The changes since `then`, by the rates of two values.
    pub(super) fn row(&self, then: Option<&TcpCounts>, rate: impl Fn(u64, Option<u64>) -> f64) -> TcpRow {
        let per_second = |field: fn(&TcpCounts) -> u64| rate(field(self), then.map(field));
        TcpRow {
            open: self.open,
            accepted: self.accepted,
            bytes_to_servers: self.bytes_to_servers,
            bytes_to_clients: self.bytes_to_clients,
            retransmitted: self.retransmitted,
            accepted_ps: per_second(|tcp| tcp.accepted),
            bytes_to_servers_ps: per_second(|tcp| tcp.bytes_to_servers),
            bytes_to_clients_ps: per_second(|tcp| tcp.bytes_to_clients),
            retransmitted_ps: self
                .retransmitted
                .map(|_| per_second(|tcp| tcp.retransmitted.unwrap_or_default())),
            memory_used_bytes: self.memory_used,
            memory_max_bytes: self.memory_max,
        }
    }
}

impl TcpRow {
    /// True if the lane sees segments.
    pub(super) fn has_segments(&self) -> bool {
        self.retransmitted.is_some()
    }

    /// The text form, behind the name of the lane.
    pub(super) fn text(&self) -> String {
        let rate = |value: f64| format_number(value.round());
        let again = self.retransmitted_ps.map(|value| format!(", {} retransmitted/s", rate(value)));
        format!(
            "{} open, {} accepted/s, {} B/s to servers, {} B/s to clients{}",
            self.open,
            rate(self.accepted_ps),
            rate(self.bytes_to_servers_ps),
            rate(self.bytes_to_clients_ps),
            again.unwrap_or_default()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::Snapshot;
    use super::super::view::View;

    /// A lane on each stack.
    fn page(at: u64) -> String {
        let own = [
            ("lane_open", 7),
            ("lane_accepted_total", at),
            ("lane_bytes_to_servers_total", 10 * at),
            ("lane_bytes_to_clients_total", 100_000 * at),
            ("lane_thread", 9),
            ("stack_memory_used_bytes", 256),
            ("stack_memory_max_bytes", 1024),
        ];
        let segments = [
            ("stack_segments_in_total", 4 * at),
            ("stack_segments_out_total", 3 * at),
            ("stack_retransmitted_total", at / 10),
            ("stack_passed_on_total", 5),
            ("stack_dropped_checksum_total", at),
            ("stack_unsent_total", 0),
        ];
        let line = |name: &str, stack: &str, value: u64| {
            format!("manylane_proxy_{name}{{socket=\"192.0.2.1:80\",stack=\"{stack}\",lane=\"0\"}} {value}\n")
        };
        let xdp = own.iter().chain(&segments).map(|(name, value)| line(name, "xdp", *value));
        let total = format!("manylane_proxy_accepted_total {at}\n");
        let kernel = own.iter().map(|(name, value)| line(name, "kernel", *value).replace(":80", ":81"));
        xdp.chain([total]).chain(kernel).collect()
    }

    #[test]
    fn lanes_of_tcp_have_rows_with_connections() {
        let at = |count| {
            let mut snapshot = Snapshot::default();
            snapshot.add(7, "proxy", &page(count));
            snapshot
        };
        let view = View::from_snapshots(&at(0), &at(200), 2.0);
        assert_eq!(view.rows.len(), 2);
        let row = &view.rows[0];
        assert_eq!((row.engine.as_str(), row.thread), ("tcp/xdp", Some(9)));
        assert_eq!((row.delivered_pps, row.sent_pps, row.lost_pps), (400.0, 300.0, 100.0));
        assert_eq!(row.losses(), "dropped_checksum 200");
        assert_eq!(row.cells()[2..7], ["0", "400", "300", "25%", "100"].map(String::from));
        let expected = "connections of 192.0.2.1:80 lane 0: 7 open, 100 accepted/s, 1000 B/s to servers, 10M B/s to clients";
        let text = view.text(9);
        assert!(text.contains(&format!("{expected}, 10 retransmitted/s\n")), "{text}");
        // The kernel alone knows the segments of its sockets.
        assert_eq!(view.rows[1].cells()[3..5], ["-", "-"].map(String::from));
        assert!(text.contains(&(expected.replace(":80", ":81") + "\n")), "{text}");
        let json = serde_json::to_value(row).unwrap();
        assert_eq!((&json["tcp"]["open"], &json["tcp"]["accepted_ps"]), (&7.into(), &100.0.into()));
    }
}
