//! `--metrics`: counters in the text format of Prometheus over HTTP, served by the library.

use std::net::{Ipv4Addr, SocketAddr};

use manylane::MetricsServer;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_addresses_are_parsed() {
        assert_eq!(parse_addr("9100").unwrap(), "127.0.0.1:9100".parse().unwrap());
        assert_eq!(parse_addr("[::1]:9100").unwrap(), "[::1]:9100".parse().unwrap());
        assert!(parse_addr("x").is_err() && parse_addr("70000").is_err() && parse_addr("1.2.3.4").is_err());
    }
}
