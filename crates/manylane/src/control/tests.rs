//! The control socket, its clients, and sockets that are forged or block.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use manylane_test_support::wait_for;

use super::*;
use crate::connection::tests::{BLOCKED, listen_with_fds, queue_lingering, run_alone, send_lingering};
use crate::service::EXIT_TIMEOUT;

fn own_sockets() -> Vec<ControlClient> {
    find_control_sockets(Some(std::process::id())).unwrap()
}

/// The reply to a request; again, as long as a side had no CPU for the 2 s that it has.
fn reply<T: Debug>(request: impl FnMut() -> Result<T>) -> Result<T> {
    let is_late = |err: &Error| {
        matches!(err.kind(), ErrorKind::Io | ErrorKind::State) || err.to_string().contains("unexpected reply")
    };
    wait_for("a reply in time", request, |reply| !reply.as_ref().is_err_and(is_late))
}

/// A name of process 1 that no other test uses.
fn unused_name(number: u32) -> String {
    format!("{NAME_PREFIX}.1.{}", number + std::process::id())
}

#[test]
fn loopback_a_forged_control_socket_is_not_queried() {
    // Process 1 runs, and has no control socket.
    let name = unused_name(900_000);
    let listener = unix_socket::listen(&name).unwrap();
    let client = ControlClient { name, pid: 1 };
    let liar = thread::spawn(move || {
        sock::wait_readable(listener.as_fd(), BLOCKED);
        let connection = unix_socket::accept(listener.as_fd()).unwrap();
        _ = unix_socket::send(connection.as_fd(), b"ok\nmanylane_lanes 7\n", &[]);
        sock::wait_readable(connection.as_fd(), BLOCKED);
        unix_socket::recv(connection.as_fd(), &mut [0; 64]).map_or(0, |(len, _)| len)
    });
    let err = client.change(&["deny 0.0.0.0/0".into()]).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Permission, "{err}");
    assert!(err.to_string().contains(&format!("belongs to process {}", std::process::id())), "{err}");
    assert_eq!(liar.join().unwrap(), 0, "it was told the question");
}

#[test]
fn loopback_descriptors_with_an_answer_are_not_received() {
    let name = unused_name(600_000);
    let listener = unix_socket::listen(&name).unwrap();
    let client = ControlClient { name, pid: std::process::id() };
    let (reader, writer) = io::pipe().unwrap();
    let sender = thread::spawn(move || {
        sock::wait_readable(listener.as_fd(), BLOCKED);
        let connection = unix_socket::accept(listener.as_fd()).unwrap();
        // From Linux 6.16 on it is not sent, and the connection ends without an answer.
        _ = unix_socket::send(connection.as_fd(), b"ok\nmanylane_lanes 7\n", &[writer.as_fd()]);
    });
    let reply = client.metrics();
    sender.join().unwrap();
    assert!(reply.is_err(), "{reply:?}");
    let start = Instant::now();
    sock::wait_readable(reader.as_fd(), BLOCKED);
    assert!(start.elapsed() < BLOCKED, "the descriptor is open");
}

#[test]
fn loopback_an_endless_response_is_cut_off() {
    let name = unused_name(800_000);
    let listener = unix_socket::listen(&name).unwrap();
    let connection = Connection::connect(&name, IO_TIMEOUT).unwrap();
    let talker = thread::spawn(move || {
        let connection = unix_socket::accept(listener.as_fd()).unwrap();
        // In small parts, so that the size limit ends nothing.
        while sock::wait_writable(connection.as_fd(), BLOCKED) {
            match unix_socket::send(connection.as_fd(), b"x", &[]) {
                Err(err) if err.kind() != io::ErrorKind::WouldBlock => return,
                _ => {}
            }
        }
    });
    let reply = recv_reply(&connection, Instant::now() + Duration::from_millis(50));
    assert_eq!(reply.unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(connection);
    talker.join().unwrap();
}

#[test]
fn loopback_silent_sockets_delay_no_answer() {
    // Again, as long as a thread had no CPU for a second.
    let mut replies = (0..10).map(|attempt| replies_of_silent_sockets(100 * attempt));
    let is_in_time = |took: Duration| took < 2 * peer::SCAN_TIMEOUT;
    let all = replies.find(|(replies, took)| is_in_time(*took) && replies.last().unwrap().is_ok());
    let mut replies = all.expect("a reply, and no longer than one timeout for all others").0;
    assert_eq!(replies.pop().unwrap().unwrap(), "here");
    let is_late = |reply: &Result<String>| reply.as_ref().is_err_and(|err| err.kind() == ErrorKind::Io);
    assert!(replies.iter().all(is_late), "{replies:?}");
}

/// The replies of sockets of which only the last one replies, and their time.
fn replies_of_silent_sockets(first: u32) -> (Vec<Result<String>>, Duration) {
    let pid = std::process::id();
    let client = |number: u32| ControlClient { name: format!("manylane.test.{pid}.{number}"), pid };
    let clients: Vec<ControlClient> = (first..first + 40).map(client).collect();
    let listeners: Vec<OwnedFd> =
        clients.iter().map(|client| unix_socket::listen(&client.name).unwrap()).collect();
    // Fill the backlog of the first one.
    let connect = || unix_socket::connect_now_without_fds(&clients[0].name, IO_TIMEOUT).ok();
    let queued: Vec<OwnedFd> = std::iter::from_fn(connect).collect();
    let replier = thread::spawn(move || {
        let last = listeners.last().unwrap();
        sock::wait_readable(last.as_fd(), BLOCKED);
        let connection = unix_socket::accept(last.as_fd()).unwrap();
        // A client that had no CPU may have left.
        _ = unix_socket::send(connection.as_fd(), b"ok\nhere", &[]);
        drop(connection);
        // The others stay open.
        listeners
    });
    let start = Instant::now();
    let replies: Vec<Result<String>> = fetch_metrics(&clients).collect();
    let took = start.elapsed();
    drop((queued, replier.join().unwrap()));
    (replies, took)
}

#[test]
fn loopback_the_socket_limit_error_names_the_remedy() {
    // Again, as long as this thread had no CPU before the connections ended.
    let mut kinds = (1..10).map(|attempt| errors_of_too_many_sockets(10_000 * attempt));
    let kinds = kinds.find(|kinds| !kinds.contains(&ErrorKind::Io)).expect("no timeout");
    let (last, others) = kinds.split_last().unwrap();
    assert_eq!(*last, ErrorKind::Limit);
    assert!(others.iter().all(|kind| *kind == ErrorKind::Config), "{kinds:?}");
}

fn errors_of_too_many_sockets(first: u32) -> Vec<ErrorKind> {
    let pid = std::process::id();
    let client = |number: u32| ControlClient { name: format!("manylane.test.{pid}.{number}"), pid };
    let count = peer::SCAN_SOCKETS_OF_PROCESS_MAX + 1;
    let clients: Vec<ControlClient> = (first..first + count).map(client).collect();
    let listeners: Vec<OwnedFd> =
        clients.iter().map(|client| unix_socket::listen(&client.name).unwrap()).collect();
    let replies = fetch_metrics(&clients);
    // All requests were sent by the call, so that these connections end without a reply.
    drop(listeners);
    replies.map(|reply| reply.unwrap_err().kind()).collect()
}

#[test]
fn loopback_a_refusal_is_received_before_the_close() {
    let name = unused_name(700_000);
    let listener = unix_socket::listen(&name).unwrap();
    // The unread request may arrive before the refusal is read, and the close at any moment
    // after that.
    for _ in 0..300 {
        let connection = Connection::connect(&name, IO_TIMEOUT).unwrap();
        let theirs = unix_socket::accept(listener.as_fd()).unwrap();
        unix_socket::send(connection.as_fd(), b"a question", &[]).unwrap();
        unix_socket::send(theirs.as_fd(), b"refused for a reason", &[]).unwrap();
        let closer = thread::spawn(move || drop(theirs));
        let reply = recv_reply(&connection, Instant::now() + REPLY_TIMEOUT);
        assert_eq!(reply.unwrap(), "refused for a reason");
        closer.join().unwrap();
    }
}

#[test]
fn loopback_a_blocking_descriptor_delays_no_reply_and_no_end() {
    run_alone("control::tests::loopback_a_blocking_descriptor_delays_no_reply_and_no_end", || {
        let pid = std::process::id();
        let reply = |number: u32| {
            let client = ControlClient { name: format!("manylane.test.lingering.{pid}.{number}"), pid };
            let page = Box::new(|| "here".to_owned());
            let listener = listen_with_fds(&client.name);
            let sent = send_lingering(&client.name);
            let control = ControlSocket::serve(listener, page, None).unwrap();
            let start = Instant::now();
            let reply = client.metrics();
            drop(control);
            let took = start.elapsed();
            drop(sent);
            (reply, took)
        };
        // Again, as long as a thread had no CPU for seconds.
        let mut replies = (0..5).map(reply);
        let all = replies.find(|(reply, took)| reply.is_ok() && *took < EXIT_TIMEOUT);
        assert_eq!(all.expect("a reply and an end without a delay").0.unwrap(), "here");
    });
}

#[test]
fn loopback_a_forged_control_socket_blocks_no_client() {
    run_alone("control::tests::loopback_a_forged_control_socket_blocks_no_client", || {
        let pid = std::process::id();
        let client = ControlClient { name: format!("manylane.test.false.{pid}"), pid };
        let listener = unix_socket::listen(&client.name).unwrap();
        let connection = Connection::connect(&client.name, IO_TIMEOUT).unwrap();
        // As before Linux 6.16.
        _ = unix_socket::accept_fds(connection.as_fd(), true);
        let theirs = unix_socket::accept(listener.as_fd()).unwrap();
        let other = queue_lingering(theirs.as_fd());
        let start = Instant::now();
        assert!(client.receive(&connection, start + REPLY_TIMEOUT).is_err());
        drop(connection);
        assert!(start.elapsed() < BLOCKED, "{:?}", start.elapsed());
        drop(other);
    });
}

#[test]
fn loopback_a_control_socket_answers_until_closed() {
    let long = "x".repeat(5 * CHUNK_LEN + 7);
    let text = long.clone();
    let filter = FilterHandle::default();
    let control = ControlSocket::with_page(move || text.clone(), Some(filter.clone())).unwrap();
    let [client] = &own_sockets()[..] else { panic!("{:?}", own_sockets()) };
    assert_eq!(reply(|| client.metrics()).unwrap(), long);
    let lines = |lines: &[&str]| lines.iter().map(ToString::to_string).collect::<Vec<_>>();
    let change = |all: &[&str]| reply(|| client.change(&lines(all)));
    change(&["limit 100/7", "deny 10.0.0.0/8", "allow 10.1.0.0/16"]).unwrap();
    let shown = "limit 100/7,per=32:64\ndeny 10.0.0.0/8\nallow 10.1.0.0/16\ndenied 0\nlimited 0\n";
    assert_eq!(reply(|| client.filter()).unwrap(), shown);
    // All or nothing.
    for wrong in ["limit x", "forget 10.0.0.1/8", "sideways", "allow"] {
        let err = change(&["forget 10.0.0.0/8", wrong]).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Config, "{wrong}");
        assert_eq!(reply(|| client.filter()).unwrap(), shown);
    }
    change(&["unlimited", "forget 10.0.0.0/8", "forget 10.1.0.0/16"]).unwrap();
    assert!(filter.current().is_empty());
    assert!(reply(|| client.request("sideways", &[])).unwrap_err().to_string().contains("unknown request"));
    let send_junk = || {
        let connection = Connection::connect(&client.name, IO_TIMEOUT)?;
        unix_socket::send(connection.as_fd(), b"\xff\xfe", &[])?;
        recv_reply(&connection, Instant::now() + REPLY_TIMEOUT)
    };
    let refused =
        wait_for("a reply in time", send_junk, |reply| reply.as_ref().is_ok_and(|text| !text.is_empty()));
    assert_eq!(refused.unwrap(), "refused the request is not UTF-8");
    let client = client.clone();
    drop(control);
    // A program that another test starts has a copy until it executes.
    wait_for("the control socket to be gone", own_sockets, Vec::is_empty);
    assert_eq!(client.metrics().unwrap_err().kind(), ErrorKind::State);
    // A control socket without a filter reports that.
    let control = ControlSocket::with_page(String::new, None).unwrap();
    assert!(reply(|| own_sockets()[0].filter()).unwrap_err().to_string().contains("engine xdp"));
    drop(control);
}
