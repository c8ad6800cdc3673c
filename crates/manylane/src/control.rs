//! A control socket for other processes of the same user, and root: they read counters, and read
//! and change the filter. `manylane top` and `manylane limit` connect to it.
//!
//! A control socket is a local socket with an abstract name, `manylane.control.PID.N`, in the
//! network namespace of the thread that opens it. A thread sleeps until a client connects. A
//! connection carries one request and one reply:
//!
//! | request | reply |
//! |---|---|
//! | `manylane.control 1 metrics` | `ok`, and the page of [`Handle::write_metrics`](crate::Handle::write_metrics) |
//! | `manylane.control 1 filter` | `ok`, and lines: `limit LIMIT`, `allow PREFIX`, `deny PREFIX`, `denied N`, `limited N` |
//! | `manylane.control 1 change` and lines: `limit LIMIT`, `unlimited`, `allow`, `deny`, `forget PREFIX` | `ok`, when all of it is in force; the first `limit` replaces all earlier ones |
//! | anything | `refused WHY` |
//!
//! Any process may bind any abstract name. So before a client sends its request, it verifies the
//! peer with the kernel's credentials (`SO_PEERCRED`): the peer has to be the process in the name,
//! and run as the same user or root. Anything else is a forged control socket: the client sends no
//! request and shows no reply.
//!
//! Lanes are not affected: only their counters are read.

#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::epoll::Epoll;
use manylane_sys::errno::EMFILE;
use manylane_sys::sock;
use manylane_sys::unix_socket::{self, PeerCred};

use crate::config::FILTER_REFUSED;
use crate::connection::{Connection, Listener};
use crate::error::{Error, ErrorKind, Result};
use crate::filter::{Filter, Limit, Prefix, Rule};
use crate::io::FilterHandle;
use crate::peer::{self, Scan, find_listeners, run_in_netns, verify_peer};
use crate::service::{LISTENER, Service, WAKE, Wakeups};
use crate::socket::Handle;

const NAME_PREFIX: &str = "manylane.control";
const VERSION: &str = "1";
/// Maximum size of a request, in bytes: some thousand prefixes. More of them take several
/// requests.
const REQUEST_LEN_MAX: usize = 128 << 10;
/// Maximum sizes of a part of a reply, and of a reply, in bytes.
const CHUNK_LEN: usize = 32 << 10;
const REPLY_LEN_MAX: usize = 16 << 20;
/// Time limits of the peer, for each part and for a whole reply.
const IO_TIMEOUT: Duration = Duration::from_secs(2);
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of parts that are received after the deadline: more than a socket can queue of
/// [`CHUNK_LEN`].
const QUEUED_PARTS_MAX: usize = 64;
/// Bound of an idle wait.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Makes the metrics page.
type Page = Box<dyn Fn() -> String + Send>;

/// A control socket; dropping it closes it.
#[derive(Debug)]
pub struct ControlSocket {
    _service: Service,
}

impl ControlSocket {
    /// Opens the control socket of a socket.
    ///
    /// # Errors
    /// System errors: no descriptors, no threads.
    pub fn open(handle: &Handle) -> Result<Self> {
        let own = handle.clone();
        Self::with_page(move || own.metrics_page(), handle.filter().ok())
    }

    /// Opens a control socket for other metrics, with a filter if there is one.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn with_page(
        page: impl Fn() -> String + Send + 'static,
        filter: Option<FilterHandle>,
    ) -> Result<Self> {
        let page: Page = Box::new(page);
        peer::listen(NAME_PREFIX)
            .and_then(|listener| Self::serve(listener, page, filter))
            .map_err(|err| Error::system("opening the control socket", err))
    }

    fn serve(listener: Listener, page: Page, filter: Option<FilterHandle>) -> io::Result<Self> {
        let work = move |watch, listener, wakeups: &Wakeups| {
            serve(watch, &listener, wakeups, &page, filter.as_ref());
        };
        Ok(Self { _service: Service::start("manylane-ctl", listener, 2, work)? })
    }
}

/// Answers clients one after the other.
fn serve(
    mut watch: Epoll,
    listener: &Listener,
    wakeups: &Wakeups,
    page: &Page,
    filter: Option<&FilterHandle>,
) {
    loop {
        let Ok(ready) = watch.wait(IDLE_TIMEOUT) else { return };
        let ready: Vec<u64> = ready.collect();
        if ready.contains(&WAKE) && wakeups.is_over() {
            return;
        }
        if !ready.contains(&LISTENER) {
            continue;
        }
        match listener.accept() {
            // The client may have disconnected meanwhile.
            Ok(connection) => _ = handle_connection(&connection, page, filter),
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
            // For example out of descriptors: do not spin.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn handle_connection(connection: &Connection, page: &Page, filter: Option<&FilterHandle>) -> io::Result<()> {
    let (peer, own) = (unix_socket::peer_cred(connection.as_fd())?, unix_socket::effective_uid());
    if !peer.is_user(0) && !peer.is_user(own) {
        let why = format!("refused only root and the user {own} of this process may query it");
        return unix_socket::send(connection.as_fd(), why.as_bytes(), &[]);
    }
    sock::wait_readable(connection.as_fd(), IO_TIMEOUT);
    let mut question = vec![0; REQUEST_LEN_MAX];
    let len = unix_socket::recv_without_fds(connection.as_fd(), &mut question)?;
    let answer = match std::str::from_utf8(&question[..len]).map_err(|_| "the request is not UTF-8".into()) {
        Ok(question) => handle_request(question, page, filter),
        Err(why) => Err(why),
    };
    let text = answer.map_or_else(|why| format!("refused {why}"), |text| format!("ok\n{text}"));
    let deadline = Instant::now() + IO_TIMEOUT;
    for part in text.as_bytes().chunks(CHUNK_LEN) {
        while let Err(err) = unix_socket::send(connection.as_fd(), part, &[]) {
            let left = deadline.saturating_duration_since(Instant::now());
            if err.kind() != io::ErrorKind::WouldBlock || !sock::wait_writable(connection.as_fd(), left) {
                return Err(err);
            }
        }
    }
    Ok(())
}

fn handle_request(
    question: &str,
    page: &Page,
    filter: Option<&FilterHandle>,
) -> std::result::Result<String, String> {
    let mut lines = question.lines();
    let words: Vec<&str> = lines.next().unwrap_or("").split_ascii_whitespace().collect();
    let verb = match words.as_slice() {
        [NAME_PREFIX, VERSION, verb] => *verb,
        [NAME_PREFIX, ..] => {
            return Err(format!("this process speaks version {VERSION} of the control protocol"));
        }
        _ => return Err("unknown request".into()),
    };
    let filter = || filter.ok_or_else(|| FILTER_REFUSED.to_owned());
    match verb {
        "metrics" => Ok(page()),
        "filter" => {
            let filter = filter()?;
            let (mut text, refused) = (describe(&filter.current()), filter.drops());
            _ = write!(text, "denied {}\nlimited {}\n", refused.denied, refused.limited);
            Ok(text)
        }
        "change" => {
            let lines: Vec<&str> = lines.collect();
            filter()?.change(|filter| change(filter, &lines)).map_err(|err| err.chain())?;
            Ok(String::new())
        }
        _ => Err("unknown request".into()),
    }
}

/// The filter as lines.
fn describe(filter: &Filter) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    for limit in filter.limits() {
        _ = writeln!(text, "limit {limit}");
    }
    for (prefix, rule) in filter.rules() {
        let verb = match rule {
            Rule::Allow => "allow",
            Rule::Deny => "deny",
        };
        _ = writeln!(text, "{verb} {prefix}");
    }
    text
}

/// Applies lines to a filter.
fn change(filter: &mut Filter, lines: &[&str]) -> Result<()> {
    let mut limits: Option<Vec<Limit>> = None;
    for line in lines {
        let prefix = |text: &str| text.parse::<Prefix>();
        match line.split_once(' ') {
            Some(("limit", limit)) => limits.get_or_insert_default().push(limit.parse()?),
            None if *line == "unlimited" => limits = Some(Vec::new()),
            Some(("allow", text)) => filter.set_rule(prefix(text)?, Some(Rule::Allow))?,
            Some(("deny", text)) => filter.set_rule(prefix(text)?, Some(Rule::Deny))?,
            Some(("forget", text)) => filter.set_rule(prefix(text)?, None)?,
            _ => return Err(Error::new(ErrorKind::Config, format!("unknown change {line:?}"))),
        }
    }
    limits.map_or(Ok(()), |limits| filter.set_limits(&limits))
}

/// A control socket of a running process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlClient {
    name: String,
    /// The process that has to be behind it.
    pid: u32,
}

/// Finds the control sockets in the network namespace of the calling thread, or those of process
/// `of`, in whichever namespace it is.
///
/// # Errors
/// [`ErrorKind::State`] if there is no process `of`. [`ErrorKind::Permission`] if it is in another
/// network namespace that this process may not enter (`CAP_SYS_ADMIN`).
pub fn find_control_sockets(of: Option<u32>) -> Result<Vec<ControlClient>> {
    let find = || {
        let found = find_listeners(NAME_PREFIX, of)?;
        Ok(found.into_iter().map(|(pid, name)| ControlClient { name, pid }).collect())
    };
    of.map_or_else(find, |pid| run_in_netns(pid, find))
}

/// As [`ControlClient::metrics`] for each of `clients`, but requests all pages at once: those of at
/// most 64 sockets of a process and 256 of a user. Each further one is an [`ErrorKind::Limit`].
///
/// The iterator receives one reply at each step. However many clients do not reply, its last step
/// is over 2 seconds after the call, and some milliseconds for each.
pub fn fetch_metrics(clients: &[ControlClient]) -> impl Iterator<Item = Result<String>> {
    request_all(clients, "metrics")
}

/// As [`ControlClient::filter`] for each of `clients`, with the limits of [`fetch_metrics`].
pub fn fetch_filters(clients: &[ControlClient]) -> impl Iterator<Item = Result<String>> {
    request_all(clients, "filter")
}

fn request_all(clients: &[ControlClient], verb: &'static str) -> impl Iterator<Item = Result<String>> {
    let mut scan = Scan::start();
    let mut request = |client: &ControlClient| {
        let (connection, peer) = client.connect(Connection::connect_now)?;
        scan.admit(peer).map_err(|err| client.failure(err))?;
        client.send(&connection, verb, &[]);
        Ok(connection)
    };
    let sent: Vec<Result<Connection>> = clients.iter().map(&mut request).collect();
    let until = scan.until;
    // Only one reply is in memory at a time. The others wait at their senders.
    clients.iter().zip(sent).map(move |(client, connection)| client.receive(&connection?, until))
}

impl ControlClient {
    /// The process in the name. It is verified with each request.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The abstract name of the socket, as it is listed: a process may have put anything after its
    /// number.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the metrics page.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the control socket is gone, [`ErrorKind::Io`] if it does not reply
    /// in time. [`ErrorKind::Permission`] if it refuses this user, or if another process is behind
    /// it.
    pub fn metrics(&self) -> Result<String> {
        self.request("metrics", &[])
    }

    /// Returns the filter and its drops, as lines of the format in the module documentation.
    ///
    /// # Errors
    /// As for [`metrics`](Self::metrics), and if its engine has no filter.
    pub fn filter(&self) -> Result<String> {
        self.request("filter", &[])
    }

    /// Changes the filter by lines of the format in the module documentation. Applies all lines,
    /// or none.
    ///
    /// # Errors
    /// As for [`filter`](Self::filter), and for invalid lines.
    pub fn change(&self, lines: &[String]) -> Result<()> {
        self.request("change", lines).map(|_| ())
    }

    fn request(&self, verb: &str, lines: &[String]) -> Result<String> {
        let (connection, _) = self.connect(Connection::connect)?;
        self.send(&connection, verb, lines);
        self.receive(&connection, Instant::now() + REPLY_TIMEOUT)
    }

    /// Connects, and verifies the process behind the socket.
    fn connect(
        &self,
        connect: fn(&str, Duration) -> io::Result<Connection>,
    ) -> Result<(Connection, PeerCred)> {
        let failed = |err| self.failure(err);
        let connection = match connect(&self.name, IO_TIMEOUT) {
            Err(err) if err.kind() == io::ErrorKind::ConnectionRefused => {
                run_in_netns(self.pid, || connect(&self.name, IO_TIMEOUT).map_err(failed))?
            }
            other => other.map_err(failed)?,
        };
        let peer = unix_socket::peer_cred(connection.as_fd()).map_err(failed)?;
        verify_peer(peer, self.pid, unix_socket::effective_uid())
            .map_err(|why| Error::new(ErrorKind::Permission, format!("process {}: {why}", self.pid)))?;
        Ok((connection, peer))
    }

    fn failure(&self, err: io::Error) -> Error {
        match err.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                Error::with(ErrorKind::Io, format!("process {} does not reply in time", self.pid), err)
            }
            io::ErrorKind::QuotaExceeded => {
                Error::new(ErrorKind::Limit, format!("process {}: {err}", self.pid))
            }
            _ if err.raw_os_error() == Some(EMFILE) => {
                Error::system(format!("connecting to process {}", self.pid), err)
            }
            _ => Error::with(ErrorKind::State, format!("process {} does not reply", self.pid), err),
        }
    }

    fn send(&self, connection: &Connection, verb: &str, lines: &[String]) {
        let mut question = format!("{NAME_PREFIX} {VERSION} {verb}");
        for line in lines {
            _ = write!(question, "\n{line}");
        }
        // A client that is refused was told so before its request.
        _ = unix_socket::send(connection.as_fd(), question.as_bytes(), &[]);
    }

    fn receive(&self, connection: &Connection, until: Instant) -> Result<String> {
        let reply = recv_reply(connection, until).map_err(|err| self.failure(err))?;
        if let Some(text) = reply.strip_prefix("ok\n") {
            return Ok(text.into());
        }
        let why = reply.strip_prefix("refused ").unwrap_or("unexpected reply");
        // Printed to a terminal: strip what another process may have injected.
        let why: String = why.chars().filter(|c| !c.is_control()).take(400).collect();
        let kind = if why.starts_with("only root") { ErrorKind::Permission } else { ErrorKind::Config };
        Err(Error::new(kind, format!("process {}: {why}", self.pid)))
    }
}

/// Receives all parts of a reply, until the deadline `until`. Those that are queued by then are
/// received, too. A part with descriptors is an error: closing those may block.
fn recv_reply(connection: &Connection, until: Instant) -> io::Result<String> {
    let (mut text, mut part) = (Vec::new(), vec![0; CHUNK_LEN]);
    let mut late = 0;
    loop {
        let now = Instant::now();
        late += usize::from(now >= until);
        if late > QUEUED_PARTS_MAX {
            return Err(io::ErrorKind::TimedOut.into());
        }
        peer::wait_for_reply(connection, until.min(now + IO_TIMEOUT))?;
        match unix_socket::recv_without_fds(connection.as_fd(), &mut part) {
            Ok(0) => break,
            Ok(len) => text.extend(&part[..len]),
            // The peer closed the connection with our request unread. The error is reported once,
            // before or after its reply.
            Err(err) if err.kind() == io::ErrorKind::ConnectionReset => {}
            Err(err) => return Err(err),
        }
        if text.len() > REPLY_LEN_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData.into())
}
