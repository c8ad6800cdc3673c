//! Clients and servers on the kernel's TCP that check every byte.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
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
