//! Clients and servers on the kernel's TCP that check every byte.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};

use crate::TEST_TIMEOUT;

/// Bytes that differ by connection and by place.
#[must_use]
pub fn pattern(connection: usize, length: usize) -> Vec<u8> {
    let mut state = connection as u64 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Sends the pattern of a connection to an echo server, closes that direction, and expects it back.
///
/// # Panics
/// If that does not come.
pub fn exchange(mut stream: TcpStream, connection: usize, length: usize) {
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let bytes = pattern(connection, length);
    let mut writer = stream.try_clone().unwrap();
    let echoed = thread::scope(|scope| {
        scope.spawn(|| {
            writer.write_all(&bytes).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut echoed = Vec::new();
        stream.read_to_end(&mut echoed).unwrap();
        echoed
    });
    assert!(echoed == bytes, "connection {connection}: {} of {length} bytes, or others", echoed.len());
}

/// Sends to an echo server without a pause, lets `happen` happen once some of it has come back, and
/// then ends. Every byte comes back.
///
/// # Panics
/// If that does not happen.
pub fn exchange_during(mut stream: TcpStream, happen: impl FnOnce()) {
    const FLOWING: usize = 1 << 20;
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let bytes = pattern(1, 1 << 16);
    let mut writer = stream.try_clone().unwrap();
    let (is_over, (flows, is_flowing)) = (AtomicBool::new(false), channel());
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0;
            while !is_over.load(Ordering::Relaxed) {
                writer.write_all(&bytes).unwrap();
                sent += bytes.len();
            }
            writer.shutdown(Shutdown::Write).unwrap();
            sent
        });
        let receiver = scope.spawn(|| {
            let (mut echoed, mut more) = (0, vec![0; bytes.len()]);
            loop {
                let at = echoed % bytes.len();
                match stream.read(&mut more[at..]).unwrap() {
                    0 => return echoed,
                    read => {
                        assert!(more[at..at + read] == bytes[at..at + read], "after {echoed} bytes");
                        echoed += read;
                    }
                }
                if echoed >= FLOWING {
                    // No one waits for it any more, after the first time.
                    _ = flows.send(());
                }
            }
        });
        is_flowing.recv_timeout(TEST_TIMEOUT).unwrap();
        happen();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(receiver.join().unwrap(), sender.join().unwrap());
    });
}

/// Serves as many connections, each on a thread of its own: sends back what comes until its end.
///
/// # Panics
/// The thread does if one of them fails.
pub fn echo(listener: TcpListener, connections: usize) -> JoinHandle<()> {
    thread::spawn(move || {
        thread::scope(|scope| {
            for _ in 0..connections {
                let (mut stream, _) = listener.accept().unwrap();
                scope.spawn(move || {
                    let mut bytes = [0; 16 << 10];
                    loop {
                        match stream.read(&mut bytes).unwrap() {
                            0 => break,
                            read => stream.write_all(&bytes[..read]).unwrap(),
                        }
                    }
                });
            }
        });
    })
}
