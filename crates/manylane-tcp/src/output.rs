//! Where packets go.

/// Takes the packets of a stack: IP headers, TCP headers, payload. The caller puts the link's
/// header in front of them.
pub trait Output {
    /// Space for a packet of at most `length` bytes, or `None` if there is none now. Asked twice
    /// without [`send`](Self::send), it returns the same.
    fn space(&mut self, length: usize) -> Option<&mut [u8]>;

    /// Sends the first `length` bytes of the space.
    fn send(&mut self, length: usize);
}
