//! Answers HTTP requests by TCP in user space, one lane for each queue of the device:
//!
//! ```sh
//! cargo run --release -p manylane --example http -- 192.0.2.1:8080
//! wrk -c 64 http://192.0.2.1:8080/      # on another machine
//! ```

use std::collections::HashMap;
use std::time::Duration;

use manylane::tcp::{Id, TcpBuilder, TcpLane, What};

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 6\r\n\r\nhello\n";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).ok_or("usage: http ADDRESS:PORT")?;
    let lanes = TcpBuilder::new().listen(&address)?.open()?;
    println!("{} lanes answer at {address}", lanes.len());
    let threads: Vec<_> = lanes.into_iter().map(|lane| std::thread::spawn(|| serve(lane))).collect();
    threads.into_iter().try_for_each(|thread| Ok(thread.join().map_err(|_| "a lane panicked")??))
}

fn serve(mut lane: TcpLane) -> manylane::Result<()> {
    // The last bytes of each connection: a request ends with an empty line.
    let mut ends: HashMap<Id, [u8; 4]> = HashMap::new();
    loop {
        lane.wait(Duration::from_secs(1))?;
        while let Some(event) = lane.event() {
            let (mut stream, end) = (lane.stream(event.id), ends.entry(event.id).or_default());
            let mut requests = 0;
            let mut count = |bytes: &[u8]| {
                for byte in bytes {
                    *end = [end[1], end[2], end[3], *byte];
                    requests += usize::from(end == b"\r\n\r\n");
                }
                bytes.len()
            };
            while event.what == What::Readable && stream.read(&mut count) > 0 {}
            (0..requests).for_each(|_| _ = stream.write(ANSWER));
            if stream.is_at_end() {
                stream.close();
                ends.remove(&event.id);
            } else if matches!(event.what, What::Closed(_)) {
                ends.remove(&event.id);
            }
        }
    }
}
