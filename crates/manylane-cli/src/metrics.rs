//! Counters in the text format of Prometheus over HTTP (`--metrics`), served by the library.

use std::net::{Ipv4Addr, SocketAddr};

use manylane::{MetricsPage, MetricsServer};
use serde::Serialize;
use serde_json::Value;

use crate::output;

/// Parses the address to serve at. A port alone means loopback.
pub(crate) fn parse_addr(text: &str) -> Result<SocketAddr, String> {
    let port = text.parse().map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    port.or_else(|_| text.parse())
        .map_err(|_| "expected a port, or an address with a port, such as 9100 or [::1]:9100".into())
}

/// Keeps the server until the process ends, and prints its address.
pub(crate) fn keep(server: MetricsServer) {
    output::eprint_line(&format!("metrics at http://{}/metrics", server.addr()));
    // Dropping the server would end it.
    std::mem::forget(server);
}

/// Adds all numbers of a row as counters, named by their fields.
pub(crate) fn add_counters(
    page: &mut MetricsPage,
    prefix: &str,
    labels: &[(&str, &str)],
    row: &impl Serialize,
    but: &[&str],
) {
    let Ok(Value::Object(fields)) = serde_json::to_value(row) else { return };
    for (field, value) in fields.iter().filter(|(field, _)| !but.contains(&field.as_str())) {
        if let Some(value) = value.as_u64() {
            page.add(&format!("{prefix}_{field}_total"), "counter", labels, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_page_is_valid_prometheus_text() {
        #[derive(Serialize)]
        struct Row {
            name: &'static str,
            sent: u64,
            steered: Option<u64>,
            tid: u32,
        }
        let mut page = MetricsPage::default();
        page.add("manylane_lanes", "gauge", &[("socket", "a\"b\\c\nd")], 2);
        for (lane, sent) in [("0", 5), ("1", 7)] {
            let row = Row { name: "x", sent, steered: None, tid: 9 };
            add_counters(&mut page, "manylane_lane", &[("lane", lane)], &row, &["tid"]);
        }
        assert_eq!(
            page.to_string(),
            "# TYPE manylane_lanes gauge\n\
             manylane_lanes{socket=\"a\\\"b\\\\c\\nd\"} 2\n\
             # TYPE manylane_lane_sent_total counter\n\
             manylane_lane_sent_total{lane=\"0\"} 5\n\
             manylane_lane_sent_total{lane=\"1\"} 7\n"
        );
    }

    #[test]
    fn listen_addresses_are_parsed() {
        assert_eq!(parse_addr("9100").unwrap(), "127.0.0.1:9100".parse().unwrap());
        assert_eq!(parse_addr("[::1]:9100").unwrap(), "[::1]:9100".parse().unwrap());
        assert!(parse_addr("x").is_err() && parse_addr("70000").is_err() && parse_addr("1.2.3.4").is_err());
    }
}
