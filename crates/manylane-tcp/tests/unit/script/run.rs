//! Runs a script: a stack, and what the lines say about it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Error, Event, Id, NetworkError, Reason, Secret, Stack, What};

use super::packet::{Packet, Path, number, numbers};
use crate::output::{Packets, pattern};

/// The time at which scripts begin.
const START: Time = Time(10_000_000);
/// How far the time of a packet may be from that of its line: smoltcp counts in fifths of
/// milliseconds, and estimates round trips in them.
const TOLERANCE: Duration = Duration::from_millis(5);
/// Port of the stack.
const PORT: u16 = 80;

type Outcome = Result<(), String>;

/// One connection of a script, and the ones after it between the same ports.
#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// Initial sequence numbers: the peer's, and the stack's, which is zero until it is seen.
    first: u32,
    own_first: u32,
    id: Option<Id>,
    read: u32,
    written: u32,
}

pub(super) struct Runner {
    stack: Stack,
    out: Packets,
    sent: VecDeque<(Time, Vec<u8>)>,
    /// The last packet that was expected: routers quote it.
    last: Vec<u8>,
    local: SocketAddr,
    peers: Vec<Peer>,
    /// The one that lines are about.
    current: usize,
    /// The time of the first line, that of the stack, and that of the last line.
    start: Time,
    now: Time,
    clock: Time,
}

/// Runs a script over one family. An error begins with the number of the line.
pub(super) fn run(text: &str, family: u8) -> Outcome {
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.split('#').next().unwrap_or("")));
    let mut config = Config::default();
    let (mut rest, mut own_first) = (Vec::new(), None);
    for (at, line) in lines {
        match *line.split_whitespace().collect::<Vec<_>>().as_slice() {
            [] => {}
            ["family", only] if only != family.to_string() => return Ok(()),
            ["family", _] => {}
            ["config", ref settings @ ..] => {
                for setting in settings {
                    let result = match setting.strip_prefix("own_first=") {
                        Some(value) => number(value).map(|value| own_first = Some(value)),
                        None => configure(&mut config, setting),
                    };
                    result.map_err(|error| format!("{at}: {error}"))?;
                }
            }
            ["open", ref syn @ ..] => {
                // A peer connects; its round trip is 10 ms.
                let syn = if syn.is_empty() { "win 65535 <mss 1000>".into() } else { syn.join(" ") };
                let window = syn.split('<').next().unwrap_or_default();
                rest.extend([
                    (at, format!("< S 0:0(0) {syn}")),
                    (at, "> S. 0:0(0) ack 1".into()),
                    (at, format!("+0.010 < . 1:1(0) ack 1 {window}")),
                    (at, "event accepted".into()),
                ]);
            }
            _ => rest.push((at, line.to_owned())),
        }
    }
    let start = own_first.map_or(START, |own_first| start_for(&config, family, own_first));
    let mut runner = Runner::new(config, family, start);
    let last = rest.last().map_or(0, |(at, _)| *at);
    for (at, line) in rest {
        runner.line(&line).map_err(|error| format!("{at}: {error}"))?;
    }
    runner.finish().map_err(|error| format!("{last}: after the last line: {error}"))
}

/// The time at which the initial number is this one: it grows by one each 4 µs.
fn start_for(config: &Config, family: u8, own_first: u32) -> Time {
    let mut runner = Runner::new(config.clone(), family, START);
    runner.line("connect").unwrap();
    let mut path = runner.path(true);
    Packet::parse(&runner.sent[0].1, &mut path).unwrap();
    START + Duration::from_micros(u64::from(own_first.wrapping_sub(path.source.1)) * 4)
}

fn configure(config: &mut Config, setting: &str) -> Outcome {
    let (name, value) = setting.split_once('=').ok_or("expected 'name=value'")?;
    let seconds = || value.parse().map(Duration::from_secs_f64).map_err(|_| "not a time");
    match name {
        "connections_max" => config.connections_max = number(value)?,
        "backlog" => config.backlog = number(value)?,
        "buffers_max" => config.buffers_max = number(value)?,
        "receive_buffer" => config.receive_buffer = number(value)?,
        "send_buffer" => config.send_buffer = number(value)?,
        "buffers_kept" => config.buffers_kept = seconds()?,
        "mtu" => config.mtu = number(value)?,
        "user_timeout" => config.user_timeout = seconds()?,
        "keep_alive" if value == "never" => config.keep_alive = None,
        "keep_alive" => config.keep_alive = Some(seconds()?),
        "keep_alive_probes" => config.keep_alive_probes = number(value)?,
        "orphan_timeout" => config.orphan_timeout = seconds()?,
        "time_wait" => config.time_wait = seconds()?,
        "time_wait_max" => config.time_wait_max = number(value)?,
        _ => return Err(format!("unknown setting {name}")),
    }
    Ok(())
}

impl Runner {
    fn new(config: Config, family: u8, start: Time) -> Runner {
        let host = if family == 4 { "192.0.2.1" } else { "[2001:db8::1]" };
        let mut runner = Runner {
            stack: Stack::new(config, Secret::new([7; 16]), start).unwrap(),
            out: Packets::default(),
            sent: VecDeque::new(),
            last: Vec::new(),
            local: format!("{host}:{PORT}").parse().unwrap(),
            peers: Vec::new(),
            current: 0,
            start,
            now: start,
            clock: start,
        };
        runner.select(5000, 1000);
        runner
    }

    /// Makes lines be about the peer at a port.
    fn select(&mut self, port: u16, first: u32) {
        let host = if self.local.is_ipv4() { "192.0.2.2" } else { "[2001:db8::2]" };
        let address: SocketAddr = format!("{host}:{port}").parse().unwrap();
        let known = self.peers.iter().position(|peer| peer.address == address);
        self.current = known.unwrap_or_else(|| {
            self.peers.push(Peer { address, first, own_first: 0, id: None, read: 0, written: 0 });
            self.peers.len() - 1
        });
    }

    fn line(&mut self, line: &str) -> Outcome {
        let mut words = line.trim();
        let (first, rest) = words.split_once(char::is_whitespace).unwrap_or((words, ""));
        if let Ok(seconds) = first.trim_start_matches('+').parse::<f64>() {
            let base = if first.starts_with('+') { self.clock } else { self.start };
            self.clock = base + Duration::from_secs_f64(seconds);
            words = rest.trim();
        }
        let (direction, segment) = words.split_once(char::is_whitespace).unwrap_or((words, ""));
        let own_mss = if self.local.is_ipv4() { 1460 } else { 1440 };
        match (direction, segment.trim()) {
            (">", "nothing") => self.quiet(),
            (">", segment) => {
                let expected = Packet::read(segment, own_mss)?;
                self.expect(&expected)
            }
            ("<" | "<<", segment) => {
                self.quiet()?;
                let packet = Packet::read(segment, own_mss)?;
                let mut bytes = packet.build(&self.path(false));
                self.stack.input(self.now, &mut bytes, false, &mut self.out);
                // Two arrows: another packet of the same batch comes.
                if direction == "<" {
                    self.flush();
                } else {
                    self.collect();
                }
                Ok(())
            }
            _ => {
                self.advance(self.clock, true)?;
                let words: Vec<&str> = words.split_whitespace().collect();
                self.call(&words)?;
                self.flush();
                Ok(())
            }
        }
    }

    /// Between the stack and the current peer.
    fn path(&self, is_sent: bool) -> Path {
        let peer = &self.peers[self.current];
        let (own, other) = ((self.local, peer.own_first), (peer.address, peer.first));
        if is_sent {
            Path { source: own, destination: other }
        } else {
            Path { source: other, destination: own }
        }
    }

    /// Expects nothing that was not, until the time of the line.
    fn quiet(&mut self) -> Outcome {
        if self.sent.is_empty() {
            self.advance(self.clock, true)?;
        }
        self.nothing_sent()
    }

    fn nothing_sent(&mut self) -> Outcome {
        let Some((at, bytes)) = self.sent.front() else { return Ok(()) };
        let at = at.since(self.start);
        match Packet::parse(bytes, &mut self.path(true)) {
            Ok(packet) => Err(format!("at {at:?}, unexpected packet: {packet}")),
            Err(error) => Err(format!("at {at:?}, unexpected packet: {error}")),
        }
    }

    fn expect(&mut self, expected: &Packet) -> Outcome {
        if self.sent.is_empty() {
            self.advance(self.clock + TOLERANCE, true)?;
        }
        let Some((at, bytes)) = self.sent.pop_front() else {
            let when = self.stack.next(self.now).map(|next| next.since(self.start));
            return Err(format!("no packet was sent; the next deadline is {when:?}"));
        };
        let mut path = self.path(true);
        let sent = Packet::parse(&bytes, &mut path)?;
        self.last = bytes;
        self.peers[self.current].own_first = path.source.1;
        if !expected.matches(&sent) {
            return Err(format!("at {:?} was sent: {sent}", at.since(self.start)));
        }
        if at + TOLERANCE < self.clock || at > self.clock + TOLERANCE {
            return Err(format!(
                "was sent at {:?}, not {:?}",
                at.since(self.start),
                self.clock.since(self.start)
            ));
        }
        Ok(())
    }

    /// Lets time pass until `end`, or a packet is sent if it `stops` then.
    fn advance(&mut self, end: Time, stops: bool) -> Outcome {
        let mut idle = 0;
        // A full device is not asked again until it has room.
        while let Some(next) = self.stack.next(self.now).filter(|next| *next <= end && self.out.room > 0) {
            idle = if next > self.now { 0 } else { idle + 1 };
            if idle > 100 {
                return Err(format!("at {:?}, the stack is busy with nothing", self.now.since(self.start)));
            }
            self.now = self.now.max(next);
            self.flush();
            if stops && !self.sent.is_empty() {
                return Ok(());
            }
        }
        self.now = self.now.max(end);
        Ok(())
    }

    fn flush(&mut self) {
        self.stack.flush(self.now, &mut self.out);
        self.collect();
    }

    fn collect(&mut self) {
        self.sent.extend(self.out.sent.drain(..).map(|bytes| (self.now, bytes)));
    }

    fn call(&mut self, words: &[&str]) -> Outcome {
        let peer = &mut self.peers[self.current];
        let (id, now) = (peer.id, self.now);
        let id = || id.ok_or("no connection");
        let equal = |text: &str, value: String| match text == value {
            true => Ok(()),
            false => Err(format!("is {value}")),
        };
        match *words {
            ["peer", port] => self.select(number(port)?, 1000),
            ["peer", port, "first", first] => self.select(number(port)?, number(first)?),
            // A new connection between the same ports.
            ["reopen", first] => {
                (peer.first, peer.own_first, peer.read, peer.written) = (number(first)?, 0, 0, 0);
            }
            ["listen", address, ref result @ ..] => {
                let result = result.get(1).unwrap_or(&"ok");
                let local = self.address(address)?;
                return equal(result, outcome(self.stack.listen(local)));
            }
            ["stop", address] => {
                let local = self.address(address)?;
                self.stack.stop_listening(local);
            }
            ["connect", ref result @ ..] => {
                let called = self.stack.connect(self.local, peer.address, now);
                peer.id = called.ok().or(peer.id);
                return equal(result.get(1).unwrap_or(&"ok"), outcome(called.map(drop)));
            }
            ["connect_from", from, "to", to, "->", result] => {
                let parse = |text: &str| text.parse().map_err(|_| "not an address");
                let called = self.stack.connect(parse(from)?, parse(to)?, now);
                return equal(result, outcome(called.map(drop)));
            }
            ["event", ref expected @ ..] => {
                let event = self.stack.event();
                let is_other = event.zip(peer.id).is_some_and(|(event, id)| event.id != id);
                if let Some(Event { id, what: What::Accepted }) = event {
                    peer.id = Some(id);
                } else if is_other {
                    return Err(format!("of another connection: {event:?}"));
                }
                return equal(&expected.join(" "), event.map_or("none".into(), |event| name(event.what)));
            }
            ["read", length, ref taken @ ..] => {
                let bytes = read(&mut self.stack, id()?, number(length)?);
                if numbers(peer.read.wrapping_add(1))
                    .zip(&bytes)
                    .any(|(number, byte)| pattern(number) != *byte)
                {
                    return Err(format!("wrong bytes after {}", peer.read));
                }
                peer.read = peer.read.wrapping_add(u32::try_from(bytes.len()).unwrap());
                return equal(taken.get(1).unwrap_or(&length), bytes.len().to_string());
            }
            ["write", length, ref taken @ ..] => {
                let bytes: Vec<u8> =
                    numbers(peer.written.wrapping_add(1)).take(number(length)?).map(pattern).collect();
                let written = self.stack.write(id()?, &bytes, now);
                peer.written = peer.written.wrapping_add(u32::try_from(written).unwrap());
                return equal(taken.get(1).unwrap_or(&length), written.to_string());
            }
            ["end"] => return equal("true", self.stack.is_at_end(id()?).to_string()),
            ["not_end"] => return equal("false", self.stack.is_at_end(id()?).to_string()),
            ["gone"] => return equal("true", self.stack.addresses(id()?).is_none().to_string()),
            ["shutdown"] => self.stack.shutdown(id()?, now),
            ["close"] => self.stack.close(id()?, now),
            ["abort"] => self.stack.abort(id()?),
            // A router quotes the last packet, eight bytes of TCP at least.
            ["icmp", "too-big", mtu] => {
                self.stack.network_error(NetworkError::TooBig { mtu: number(mtu)? }, quoted(&self.last));
            }
            ["icmp", "unreachable"] => {
                self.stack.network_error(NetworkError::Unreachable, quoted(&self.last));
            }
            // The device takes so many packets more.
            ["output", room] => self.out.room = if room == "all" { usize::MAX } else { number(room)? },
            ["levels", ref expected @ ..] => return compare(expected, &format!("{:?}", self.stack.levels())),
            ["counters", ref expected @ ..] => {
                return compare(expected, &format!("{:?}", self.stack.counters()));
            }
            _ => return Err(format!("unknown line: {}", words.join(" "))),
        }
        Ok(())
    }

    /// `80`: this port of all addresses; `own`: the address of the stack; `other`: another one.
    fn address(&self, text: &str) -> Result<SocketAddr, String> {
        let mut local = self.local;
        match (text, local.is_ipv4()) {
            ("own", _) => {}
            ("other", true) => local.set_ip([192, 0, 2, 77].into()),
            ("other", false) => local.set_ip([0xfd00, 0, 0, 0, 0, 0, 0, 77].into()),
            (port, is_ipv4) => {
                local.set_ip(if is_ipv4 { [0; 4].into() } else { [0; 16].into() });
                local.set_port(number(port)?);
            }
        }
        Ok(local)
    }

    /// Expects nothing more, and that nothing is left once all is aborted.
    fn finish(mut self) -> Outcome {
        self.quiet()?;
        if let Some(event) = self.stack.event() {
            return Err(format!("unexpected event: {}", name(event.what)));
        }
        let counters = self.stack.counters();
        for id in self.peers.iter().filter_map(|peer| peer.id) {
            self.stack.abort(id);
        }
        self.out.room = usize::MAX;
        self.advance(self.now + Duration::from_secs(3600), false)?;
        let levels = self.stack.levels();
        let left = (levels.connections, levels.backlog, levels.time_wait, levels.buffers_used);
        if left != (0, 0, 0, 0) {
            return Err(format!("something is left: {levels:?}, counters before: {counters:?}"));
        }
        Ok(())
    }
}

/// The part of a packet that every router quotes.
fn quoted(packet: &[u8]) -> &[u8] {
    let ip = if packet.first().is_some_and(|first| first >> 4 == 4) { 20 } else { 40 };
    packet.get(..ip + 8).unwrap_or_default()
}

/// Compares `name=value` with the debug format of a struct.
fn compare(expected: &[&str], there: &str) -> Outcome {
    let fields = there.replace(['{', '}'], ",");
    let wrong = expected.iter().find(|expected| {
        let expected = expected.replace('=', ": ");
        !fields.split(',').any(|field| field.trim() == expected)
    });
    wrong.map_or(Ok(()), |wrong| Err(format!("not {wrong}: {there}")))
}

fn name(what: What) -> String {
    match what {
        What::Accepted => "accepted",
        What::Connected => "connected",
        What::Readable => "readable",
        What::Writable => "writable",
        What::Closed(Reason::Finished) => "closed finished",
        What::Closed(Reason::Reset) => "closed reset",
        What::Closed(Reason::Refused) => "closed refused",
        What::Closed(Reason::TimedOut) => "closed timed out",
        What::Closed(Reason::Unreachable) => "closed unreachable",
    }
    .into()
}

fn outcome(result: Result<(), Error>) -> String {
    match result {
        Ok(()) => "ok",
        Err(Error::Config(_)) => "config",
        Err(Error::NoPort) => "no-port",
        Err(Error::Families) => "families",
        Err(Error::InUse(_)) => "in-use",
        Err(Error::TooMany) => "too-many",
    }
    .into()
}

/// Reads at most so many bytes: less if there are no more.
fn read(stack: &mut Stack, id: Id, max: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < max {
        let left = max - bytes.len();
        let taken = stack.read(id, |piece| {
            let piece = &piece[..piece.len().min(left)];
            bytes.extend_from_slice(piece);
            piece.len()
        });
        if taken == 0 {
            break;
        }
    }
    bytes
}
