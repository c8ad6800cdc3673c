//! An echo server with its counters at `http://127.0.0.1:9100/metrics`, in the text form of
//! Prometheus.

use manylane::Socket;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = Socket::bind("127.0.0.1:7777")?;
    // As long as this value lives. A program that has an HTTP server writes the page with
    // `Handle::write_metrics`.
    let _metrics = socket.handle().serve_metrics("127.0.0.1:9100".parse()?)?;
    socket.serve(|batch, out| {
        for datagram in batch {
            out.reply(&datagram, datagram.payload());
        }
    })?;
    Ok(())
}
