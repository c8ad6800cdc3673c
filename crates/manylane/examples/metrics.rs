//! An echo server with its counters at `http://127.0.0.1:9100/metrics`, in the text form of Prometheus.
//!
//! The library writes the page; how it is served is up to the program. This one answers one request after the other
//! and does not look at what was asked, which is enough for a scraper on the same machine.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use manylane::{Handle, Socket};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let socket = Socket::bind("127.0.0.1:7777")?;
    let listener = TcpListener::bind("127.0.0.1:9100")?;
    let handle = socket.handle();
    thread::spawn(move || serve(&listener, &handle));
    socket.serve(|batch, out| {
        for datagram in batch {
            out.reply(&datagram, datagram.payload());
        }
    })?;
    Ok(())
}

fn serve(listener: &TcpListener, handle: &Handle) {
    for mut stream in listener.incoming().flatten() {
        // Whoever says nothing, or goes, is not waited for.
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        let _ = stream.read(&mut [0; 4096]);
        let mut page = String::new();
        if handle.write_metrics(&mut page).is_ok() {
            let head =
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(page.as_bytes()));
        }
    }
}
