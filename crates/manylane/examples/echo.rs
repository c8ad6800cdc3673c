//! Answers each datagram with its own payload: one lane per CPU, until Enter is pressed.

use manylane::Builder;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("127.0.0.1:7007".into());
    let socket = Builder::new(&address)?.open()?;
    println!("{} on {} lanes, steering: {}", socket.local_addr(), socket.lane_count(), socket.steering());

    let handle = socket.handle();
    std::thread::spawn(move || std::io::stdin().read_line(&mut String::new()).map(|_| handle.stop()));

    let counters = socket.serve(|batch, out| {
        for datagram in batch {
            out.reply(&datagram, datagram.payload());
        }
    })?;
    println!("{} arrived, {} answered", counters.total().arrived(), counters.total().sent);
    Ok(())
}
