//! The device of a test: packets that were sent, in order.

use std::collections::VecDeque;

use manylane_tcp::Output;

pub(crate) struct Packets {
    pub(crate) sent: VecDeque<Vec<u8>>,
    /// Packets that are accepted before the device is full.
    pub(crate) room: usize,
    space: Vec<u8>,
}

impl Default for Packets {
    fn default() -> Packets {
        Packets { sent: VecDeque::new(), room: usize::MAX, space: vec![0; 1 << 16] }
    }
}

impl Output for Packets {
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        // As much as was asked for, and not clean.
        let space = &mut self.space[..length];
        space.fill(0xa5);
        (self.room > 0).then_some(space)
    }

    fn send(&mut self, length: usize, _: u16) {
        self.room -= 1;
        self.sent.push_back(self.space[..length].to_vec());
    }
}

/// The byte of a stream with this number; the first one after SYN is 1.
#[expect(clippy::cast_possible_truncation, reason = "one byte of it")]
pub(crate) fn pattern(number: u32) -> u8 {
    (number ^ number >> 8 ^ number >> 16 ^ number >> 24) as u8
}
