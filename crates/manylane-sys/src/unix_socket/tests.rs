//! Connections between threads of this process.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::time::Instant;

use manylane_test_support::wait_for;

use super::*;

fn name() -> String {
    format!("manylane.test.{}.{:?}", std::process::id(), std::thread::current().id())
}

/// True if nothing is queued.
fn is_empty<T>(received: &io::Result<T>) -> bool {
    received.as_ref().is_err_and(|err| err.kind() == ErrorKind::WouldBlock)
}

#[test]
fn messages_keep_their_bounds_and_carry_descriptors() {
    let name = name();
    let listener = listen(&name).unwrap();
    assert_eq!(accept(listener.as_fd()).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(listen(&name).unwrap_err().kind(), ErrorKind::AddrInUse);
    let client = connect(&name, Duration::from_secs(5)).unwrap();
    let server = accept(listener.as_fd()).unwrap();
    let mine = PeerCred { pid: std::process::id(), uid: effective_uid() };
    assert_eq!((peer_cred(server.as_fd()).unwrap(), peer_cred(client.as_fd()).unwrap()), (mine, mine));
    let process = PeerProcess::from_socket(server.as_fd()).unwrap();
    assert!(process.cred == mine && process.is_alive() && process.is_same(&process));
    send(client.as_fd(), b"one", &[]).unwrap();
    let (mut reader, writer) = io::pipe().unwrap();
    send(client.as_fd(), b"two", &[writer.as_fd(), writer.as_fd()]).unwrap();
    drop(writer);
    let mut buffer = [0; 8];
    let (len, fds) = recv(server.as_fd(), &mut buffer).unwrap();
    assert_eq!((&buffer[..len], fds.len()), (&b"one"[..], 0));
    let (len, mut fds) = recv(server.as_fd(), &mut buffer).unwrap();
    assert_eq!((&buffer[..len], fds.len()), (&b"two"[..], 2));
    assert_eq!(recv(server.as_fd(), &mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    io::Write::write_all(&mut File::from(fds.remove(0)), b"through").unwrap();
    drop(fds);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "through");
    send(client.as_fd(), b"longer than that", &[]).unwrap();
    assert_eq!(recv(server.as_fd(), &mut buffer).unwrap_err().kind(), ErrorKind::InvalidData);
    drop(client);
    // A program that another test starts has a copy until it executes.
    let end = || recv(server.as_fd(), &mut buffer).map(|(len, _)| len);
    let end = wait_for("the end of the connection", end, |end| !is_empty(end));
    assert_eq!(end.unwrap(), 0);
    assert_eq!(send(server.as_fd(), b"gone", &[]).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn unwanted_descriptors_are_not_received() {
    let name = name();
    let listener = listen_without_fds(&name).unwrap();
    let client = connect(&name, Duration::from_secs(5)).unwrap();
    let server = accept(listener.as_fd()).unwrap();
    let sent = send(client.as_fd(), b"some", &[client.as_fd()]);
    match recv(server.as_fd(), &mut [0; 8]) {
        Err(err) => {
            assert_eq!(err.kind(), ErrorKind::WouldBlock);
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
        }
        Ok((_, fds)) => {
            println!("skipped: this kernel has no SO_PASSRIGHTS (Linux 6.16)");
            assert_eq!((sent.is_ok(), fds.len()), (true, 1));
        }
    }
    send(client.as_fd(), b"more", &[]).unwrap();
    assert_eq!(recv(server.as_fd(), &mut [0; 8]).unwrap().0, 4);
    // In the other direction they arrive as usual.
    send(server.as_fd(), b"back", &[server.as_fd()]).unwrap();
    assert_eq!(recv(client.as_fd(), &mut [0; 8]).unwrap().1.len(), 1);
}

#[test]
fn clients_receive_no_unwanted_descriptors() {
    let name = name();
    let listener = listen(&name).unwrap();
    let client = connect_without_fds(&name, Duration::from_secs(5)).unwrap();
    let server = accept(listener.as_fd()).unwrap();
    let mut buffer = [0; 8];
    let start = Instant::now();
    let nothing = recv_without_fds(client.as_fd(), &mut buffer).unwrap_err();
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
    assert!(start.elapsed() < Duration::from_secs(5), "it does not wait");
    send(server.as_fd(), b"some", &[]).unwrap();
    assert_eq!(recv_without_fds(client.as_fd(), &mut buffer).unwrap(), 4);
    assert_eq!(&buffer[..4], b"some");
    let sent = send(server.as_fd(), b"more", &[server.as_fd()]);
    match accept_fds(client.as_fd(), true) {
        Ok(()) => {
            assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::EPERM));
            send(server.as_fd(), b"more", &[server.as_fd()]).unwrap();
        }
        Err(_) => sent.unwrap(),
    }
    let refused = recv_without_fds(client.as_fd(), &mut buffer).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidData);
    let (len, fds) = recv(client.as_fd(), &mut buffer).unwrap();
    assert_eq!((len, fds.len()), (4, 1), "it stays queued");
    drop(fds);
    send(server.as_fd(), b"longer than that", &[]).unwrap();
    let refused = recv_without_fds(client.as_fd(), &mut buffer).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidData);
    discard(client.as_fd()).unwrap();
    drop(server);
    // A program that another test starts has a copy until it executes.
    let end = || recv_without_fds(client.as_fd(), &mut buffer);
    let end = wait_for("the end of the connection", end, |end| !is_empty(end));
    assert_eq!(end.unwrap(), 0);
}

#[test]
fn peeked_messages_keep_their_descriptors() {
    let name = name();
    let listener = listen(&name).unwrap();
    let client = connect(&name, Duration::from_secs(5)).unwrap();
    let server = accept(listener.as_fd()).unwrap();
    enable_peek(server.as_fd()).unwrap();
    let mut buffer = [0; 2];
    assert_eq!(wait_for_message(server.as_fd()).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(peek(server.as_fd(), &mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    let (mut reader, writer) = io::pipe().unwrap();
    for fds in [&[][..], &[writer.as_fd(), writer.as_fd()]] {
        for message in [&b""[..], b"some"] {
            send(client.as_fd(), message, fds).unwrap();
        }
    }
    drop(writer);
    wait_for_message(server.as_fd()).unwrap();
    let plain = Peeked { len: 0, has_fds: false };
    assert_eq!(peek(server.as_fd(), &mut buffer).unwrap(), Some(plain));
    discard(server.as_fd()).unwrap();
    assert_eq!(peek(server.as_fd(), &mut buffer).unwrap(), Some(Peeked { len: 4, ..plain }));
    assert_eq!(&buffer, b"so");
    assert!(!drain(server.as_fd()), "messages with descriptors are left");
    assert_eq!(send(client.as_fd(), b"more", &[]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    for len in [0, 4] {
        assert_eq!(peek(server.as_fd(), &mut []).unwrap(), Some(Peeked { len, has_fds: true }));
        let (len_received, fds) = recv(server.as_fd(), &mut [0; 8]).unwrap();
        assert_eq!((len_received, fds.len()), (len, 2));
    }
    assert_eq!(reader.read(&mut buffer).unwrap(), 0, "all descriptors were received");
    assert!(drain(server.as_fd()));
    drop(client);
    // A program that another test starts has a copy until it executes.
    let end = || peek(server.as_fd(), &mut []);
    let end = wait_for("the end of the connection", end, |end| !is_empty(end));
    assert_eq!(end.unwrap(), None);
}

#[test]
fn waiting_has_a_bound() {
    let name = name();
    let _listener = listen(&name).unwrap();
    let client = connect(&name, Duration::from_millis(1)).unwrap();
    assert_eq!(recv(client.as_fd(), &mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(connect(&format!("{name}.nobody"), Duration::from_secs(5)).is_err());
    assert_eq!(listen(&"x".repeat(108)).unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
}
