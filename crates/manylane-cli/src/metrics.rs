//! Counters in the text form of Prometheus, over HTTP, when asked for (`--metrics`).
//!
//! One thread answers one request after the other; nothing of it is seen by lanes but that their counters are read. A client
//! has a bounded time for its request and for taking the answer, and whoever asks for anything else is told so.

use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use crate::output;

/// Time that a client has in each direction.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request that is read.
const LONGEST: usize = 8192;
const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Parses where to serve: a port is one of this machine alone.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text.parse().map(|port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    port.or_else(|_| text.parse())
        .map_err(|_| "give a port, or an address with a port, such as 9100 or [::1]:9100".into())
}

/// A port for metrics that nobody answers at yet.
#[derive(Debug)]
pub(crate) struct Metrics {
    listener: TcpListener,
    at: SocketAddr,
}

impl Metrics {
    /// Takes the port.
    ///
    /// # Errors
    /// If it cannot be had.
    pub(crate) fn bind(at: SocketAddr) -> Result<Self> {
        let what = || format!("cannot serve metrics at {at}");
        let listener = TcpListener::bind(at).with_context(what)?;
        let at = listener.local_addr().with_context(what)?;
        Ok(Self { listener, at })
    }

    /// Serves what `render` makes at each request, as long as this process lives, and says where. The thread that does so
    /// handles the signals that the calling one does.
    ///
    /// # Errors
    /// When the system has no thread for us.
    pub(crate) fn serve(self, render: impl Fn() -> String + Send + 'static) -> Result<SocketAddr> {
        let Self { listener, at } = self;
        let work = move || {
            for stream in listener.incoming() {
                match stream {
                    // Whoever has gone meanwhile has.
                    Ok(stream) => drop(answer(stream, &render)),
                    // Out of descriptors, say: not at full speed.
                    Err(_) => thread::sleep(Duration::from_millis(100)),
                }
            }
        };
        let started = thread::Builder::new().name("metrics".into()).spawn(work);
        started.with_context(|| format!("cannot serve metrics at {at}"))?;
        output::tell(&format!("metrics at http://{at}/metrics"));
        Ok(at)
    }
}

fn answer(mut stream: TcpStream, render: &dyn Fn() -> String) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let request = request(&mut stream)?;
    let mut words = request.split(|&byte| byte == b' ' || byte == b'\r');
    let (status, kind, body) = match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => ("200 OK", TYPE, render()),
        (Some(b"GET"), _) => ("404 Not Found", "text/plain", "it is /metrics\n".into()),
        _ => ("405 Method Not Allowed\r\nAllow: GET", "text/plain", "GET /metrics\n".into()),
    };
    let len = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.flush()
}

/// The request up to its empty line; nothing that follows is looked at.
fn request(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let (mut request, mut part) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > LONGEST {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(len) => request.extend(&part[..len]),
            // This process was stopped for a moment.
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
    Ok(request)
}

/// A page of metrics: each with its samples behind each other, as the format wants it.
#[derive(Debug, Default)]
pub(crate) struct Page {
    families: Vec<(String, &'static str, Vec<String>)>,
}

impl Page {
    /// Adds a sample: its labels, its value.
    pub(crate) fn add(&mut self, name: &str, kind: &'static str, labels: &[(&str, &str)], value: u64) {
        let mut sample = name.to_owned();
        if !labels.is_empty() {
            sample.push('{');
        }
        for (at, (label, text)) in labels.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            // Writing to a string does not fail.
            let _ = write!(sample, "{comma}{label}=\"{}\"", escaped(text));
        }
        let _ = write!(sample, "{} {value}", if labels.is_empty() { "" } else { "}" });
        match self.families.iter_mut().find(|(family, ..)| family == name) {
            Some((_, _, samples)) => samples.push(sample),
            None => self.families.push((name.into(), kind, vec![sample])),
        }
    }

    /// Adds all numbers of a row as counters, named by their fields.
    pub(crate) fn counters(
        &mut self,
        prefix: &str,
        labels: &[(&str, &str)],
        row: &impl Serialize,
        but: &[&str],
    ) {
        let Ok(Value::Object(fields)) = serde_json::to_value(row) else { return };
        for (field, value) in fields.iter().filter(|(field, _)| !but.contains(&field.as_str())) {
            if let Some(value) = value.as_u64() {
                self.add(&format!("{prefix}_{field}_total"), "counter", labels, value);
            }
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (name, kind, samples) in &self.families {
            let _ = writeln!(text, "# TYPE {name} {kind}");
            for sample in samples {
                let _ = writeln!(text, "{sample}");
            }
        }
        text
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(at: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(at).unwrap();
        // One that asks for too much may be reset before it has said all.
        let _ = stream.write_all(request).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn a_page_has_the_form_that_is_wanted() {
        #[derive(Serialize)]
        struct Row {
            name: &'static str,
            sent: u64,
            steered: Option<u64>,
            tid: u32,
        }
        let mut page = Page::default();
        page.add("manylane_lanes", "gauge", &[("socket", "a\"b\\c\nd")], 2);
        for (lane, sent) in [("0", 5), ("1", 7)] {
            let row = Row { name: "x", sent, steered: None, tid: 9 };
            page.counters("manylane_lane", &[("lane", lane)], &row, &["tid"]);
        }
        assert_eq!(
            page.text(),
            "# TYPE manylane_lanes gauge\n\
             manylane_lanes{socket=\"a\\\"b\\\\c\\nd\"} 2\n\
             # TYPE manylane_lane_sent_total counter\n\
             manylane_lane_sent_total{lane=\"0\"} 5\n\
             manylane_lane_sent_total{lane=\"1\"} 7\n"
        );
    }

    #[test]
    fn requests_are_answered_and_nonsense_is_not() {
        let at = Metrics::bind(address("0").unwrap()).unwrap().serve(|| "up 1\n".into()).unwrap();
        assert!(at.ip().is_loopback());
        let answer = ask(at, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nup 1\n"), "{answer}");
        assert!(answer.contains("Content-Length: 5\r\n"));
        assert!(ask(at, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(at, b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        for nonsense in [&b""[..], b"GET /metrics", &[b'x'; 20_000], b"\xff\xfe\r\n\r\n"] {
            let answer = ask(at, nonsense);
            assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        // And it still answers.
        assert!(ask(at, b"GET /metrics HTTP/1.0\r\n\r\n").contains("up 1"));
    }

    #[test]
    fn where_to_serve() {
        assert_eq!(address("9100").unwrap(), "127.0.0.1:9100".parse().unwrap());
        assert_eq!(address("[::1]:9100").unwrap(), "[::1]:9100".parse().unwrap());
        assert!(address("x").is_err() && address("70000").is_err() && address("1.2.3.4").is_err());
    }
}
