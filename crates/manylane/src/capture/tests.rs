//! The reading side of a capture against processes that lie, write without end, or block.

use std::os::fd::BorrowedFd;
use std::sync::mpsc;
use std::thread;

use manylane_sys::sock;

use super::listener::CaptureListener;
use super::*;
use crate::connection::tests::{listen_with_fds, run_alone, send_lingering};
use crate::service::EXIT_TIMEOUT;

const TIMEOUT: Duration = Duration::from_secs(120);

fn send(from: &OwnedFd, reply: &Reply, files: &[BorrowedFd<'_>]) {
    unix_socket::send(from.as_fd(), reply.to_text().as_bytes(), files).unwrap();
}

fn description(number: u16) -> Description {
    let address = SocketAddr::from(([192, 0, 2, 7], number));
    Description { address, devices: vec![(3, "eth0".into())], lanes: vec![1], captured_by: None }
}

#[test]
fn only_a_ring_comes_with_descriptors() {
    let name = format!("manylane.test.ring.{}", std::process::id());
    let listener = unix_socket::listen(&name).unwrap();
    let client = Connection::connect(&name, TIMEOUT).unwrap();
    _ = unix_socket::accept_fds(client.as_fd(), true);
    let server = unix_socket::accept(listener.as_fd()).unwrap();
    for reply in [Reply::Ring(3), Reply::Started] {
        send(&server, &reply, &[server.as_fd()]);
    }
    assert!(recv_reply(&client, false).is_err(), "no ring was asked for");
    let (reply, files) = recv_reply(&client, true).unwrap();
    assert_eq!((reply, files.len()), (Reply::Ring(3), 1));
    assert!(recv_reply(&client, true).is_err(), "it is no ring");
}

#[test]
fn loopback_a_forged_socket_is_asked_nothing() {
    // Process 1 runs, and has no capture socket.
    let number = 900_000 + std::process::id();
    let listener = unix_socket::listen(&format!("{}.1.{number}", messages::NAME_PREFIX)).unwrap();
    let liar = thread::spawn(move || {
        sock::wait_readable(listener.as_fd(), TIMEOUT);
        let connection = unix_socket::accept(listener.as_fd()).unwrap();
        _ = unix_socket::send(
            connection.as_fd(),
            Reply::Description(description(1)).to_text().as_bytes(),
            &[],
        );
        sock::wait_readable(connection.as_fd(), TIMEOUT);
        unix_socket::recv(connection.as_fd(), &mut [0; 64]).map_or(0, |(len, _)| len)
    });
    let Targets { targets, refused } = find_targets(None).unwrap();
    assert_eq!(liar.join().unwrap(), 0, "it was told the question");
    assert!(targets.iter().all(|target| target.address() != description(1).address), "{targets:?}");
    let (_, why) = refused.iter().find(|(pid, _)| *pid == 1).unwrap();
    assert!(why.contains(&format!("belongs to process {}", std::process::id())), "{why}");
}

/// A captured socket whose process sends what `liar` does after the start of a capture.
fn start_with(name: &str, liar: impl FnOnce(&OwnedFd) + Send + 'static) -> Result<Capture> {
    let name = format!("manylane.test.{name}.{}", std::process::id());
    let listener = unix_socket::listen(&name).unwrap();
    let connection = Connection::connect(&name, TIMEOUT).unwrap();
    let theirs = unix_socket::accept(listener.as_fd()).unwrap();
    let peer = thread::spawn(move || {
        sock::wait_readable(theirs.as_fd(), TIMEOUT);
        unix_socket::recv(theirs.as_fd(), &mut [0; 64]).unwrap();
        liar(&theirs);
    });
    let target =
        Target { connection, pid: std::process::id(), description: description(2), lanes: Vec::new() };
    let capture = Capture::start(vec![target], SNAPLEN_MAX, 0);
    peer.join().unwrap();
    capture
}

#[test]
fn loopback_a_process_may_send_a_ring_for_each_lane() {
    let rings = |count: usize| {
        move |to: &OwnedFd| {
            let (_producer, files) = rings::create(&[3], listener::clamp_buffer_size(0)).unwrap();
            let ring = [files[0].as_fd(), files[1].as_fd()];
            let replies = (0..count).map(|lane| (Reply::Ring(lane as u64), &ring[..]));
            for (reply, files) in replies.chain([(Reply::Started, &[][..])]) {
                // There may be no room for a moment. The other end may have left.
                while let Err(err) = unix_socket::send(to.as_fd(), reply.to_text().as_bytes(), files) {
                    if err.kind() != io::ErrorKind::WouldBlock {
                        return;
                    }
                    _ = sock::wait_writable(to.as_fd(), TIMEOUT);
                }
            }
        }
    };
    let capture = start_with("rings", rings(RINGS_MAX)).unwrap();
    assert_eq!(capture.sources[0].lanes.len(), RINGS_MAX);
    let err = start_with("more-rings", rings(RINGS_MAX + 1)).unwrap_err();
    assert!(err.chain().contains("more rings"), "{}", err.chain());
}

/// Each frame that is read makes room for the next one, of the same time.
#[test]
fn loopback_a_process_that_keeps_writing_prolongs_no_capture() {
    let (give, given) = mpsc::channel();
    let one_ring = move |to: &OwnedFd| {
        let (producer, files) = rings::create(&[3], listener::clamp_buffer_size(0)).unwrap();
        send(to, &Reply::Ring(1), &[files[0].as_fd(), files[1].as_fd()]);
        send(to, &Reply::Started, &[]);
        give.send(producer).unwrap();
    };
    let mut capture = start_with("stop", one_ring).unwrap();
    let mut producer = given.recv().unwrap();
    let head = rings::RecordHeader { time: 7, ifindex: 3, queue: 0, direction: Direction::In, len: 60 };
    (0..3).for_each(|_| producer.record(&head, &[0; 60]));
    capture.stop();
    let mut count = 0;
    while count < 100 && capture.next_frame().is_some() {
        count += 1;
        producer.record(&head, &[0; 60]);
    }
    assert_eq!(count, 3);
}

#[test]
fn loopback_a_blocking_descriptor_delays_no_reply_and_no_end() {
    run_alone("capture::tests::loopback_a_blocking_descriptor_delays_no_reply_and_no_end", || {
        let took = |number: u32| {
            let name = format!("manylane.test.capture.{}.{number}", std::process::id());
            let address = description(3).address;
            let listener = listen_with_fds(&name);
            let sent = send_lingering(&name);
            let captures = CaptureListener::serve(listener, address, Vec::new()).unwrap();
            let start = Instant::now();
            let connection = Connection::connect(&name, TIMEOUT).unwrap();
            send_describe(&connection).unwrap();
            let (reply, _) = recv_reply(&connection, false).unwrap();
            assert!(matches!(reply, Reply::Description(about) if about.address == address));
            drop(captures);
            let took = start.elapsed();
            drop(sent);
            took
        };
        // Again, as long as a thread had no CPU for seconds.
        assert!((0..5).map(took).any(|took| took < EXIT_TIMEOUT), "an end after {EXIT_TIMEOUT:?}");
    });
}
