//! Where packets go.

use std::net::SocketAddr;

/// Takes the packets of a stack: IP headers, TCP headers, payload. The caller puts the link's
/// header in front of them.
pub trait Output {
    /// Space for a packet of at most `length` bytes, or `None` if there is none now. Asked twice
    /// without [`send`](Self::send), it returns the same.
    fn space(&mut self, length: usize) -> Option<&mut [u8]>;

    /// Sends the first `length` bytes of the space over a link: that of the packet which began the
    /// connection, or 0 if we did.
    fn send(&mut self, length: usize, link: u16);

    /// Takes a packet to `local` that came over `link` and belongs to no connection of the stack,
    /// before the stack answers it by a reset. True if another stack may have its connection, and
    /// it went there.
    fn pass_on(&mut self, local: SocketAddr, link: u16, packet: &[u8]) -> bool {
        _ = (local, link, packet);
        false
    }
}
