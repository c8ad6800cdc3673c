//! The doorbell of companions: whether one may have something, known without a system call.
//!
//! To ask a companion is a system call, and after a pause nothing that it needs in the kernel is in the cache. A lane whose queues
//! are busy could ask seldom only, and most of the time there is nothing. So a filter on the socket (`bpf/doorbell.bpf.c`)
//! counts what is about to be queued, in a word that is mapped here, and the lane asks only if that has moved.
//!
//! | event | what happens |
//! |---|---|
//! | the kernel queues a datagram | it runs the filter first: the word moves |
//! | a lane's turn comes to look | a load; if the word has moved, the companion is asked, and some more times after that |
//! | the queues of a lane are empty | its companion is asked, or wakes the lane: no word is needed |
//! | no doorbell (before Linux 5.5) | the companion is asked each time that its turn comes |
//!
//! One word serves all companions of a socket: a lane may ask in vain because another one's companion got something. It is then
//! no worse off than without.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use aya::EbpfLoader;
use aya::maps::Map;
use aya::programs::{ProgramFd, SocketFilter};
use manylane_sys::map::SharedWords;
use manylane_sys::sock;

use crate::verify::verified;

/// How often a companion is asked after the word has moved: the datagram is queued a moment after that, and others may wait
/// behind the batch that was taken.
const ASKS: u32 = 4;

/// The program and its word.
pub(super) struct Doorbell {
    program: ProgramFd,
    rings: Arc<SharedWords>,
}

impl Doorbell {
    /// Loads the program.
    ///
    /// # Errors
    /// Why there can be none, which is no reason to do without the engine.
    pub(super) fn open() -> Result<Self, Box<dyn std::error::Error>> {
        let object = manylane_bpf::object("doorbell")?;
        // The program has no relocations against the kernel's types, and parsing those takes long.
        let mut ebpf = EbpfLoader::new().btf(None).load(object)?;
        // Before the map is taken out: loading writes its descriptor into the program.
        let filter = ebpf.program_mut("ml_doorbell").ok_or("the eBPF object has no program ml_doorbell")?;
        let filter: &mut SocketFilter = filter.try_into()?;
        verified(|| filter.load())?;
        let program = filter.fd()?.try_clone()?;
        let Some(Map::Array(rings)) = ebpf.take_map("ml_rings") else {
            return Err("the eBPF object has no array ml_rings".into());
        };
        Ok(Self { program, rings: Arc::new(SharedWords::new(rings.fd().as_fd(), 1)?) })
    }

    /// Has the doorbell ring for a companion, instead of whatever filter that has. Needs no privilege.
    ///
    /// # Errors
    /// What `setsockopt(2)` reports.
    pub(super) fn hang(&self, companion: BorrowedFd<'_>) -> io::Result<Ear> {
        sock::attach_filter(companion, self.program.as_fd())?;
        Ok(Ear::new(Arc::clone(&self.rings)))
    }
}

/// What a lane has heard of the doorbell.
#[derive(Debug)]
pub(super) struct Ear {
    rings: Arc<SharedWords>,
    heard: u64,
    /// So many times the companion is to be asked, whether the word moves or not.
    asks: u32,
}

impl Ear {
    /// Of a companion that may have something already.
    fn new(rings: Arc<SharedWords>) -> Self {
        Self { heard: rings.load(0), rings, asks: ASKS }
    }

    /// Whether the companion may have something.
    #[inline]
    pub(super) fn hears(&self) -> bool {
        self.asks > 0 || self.rings.load(0) != self.heard
    }

    /// The companion is about to be asked. What rings from here on asks for it anew.
    #[inline]
    pub(super) fn answer(&mut self) {
        let rings = self.rings.load(0);
        self.asks = if rings == self.heard { self.asks.saturating_sub(1) } else { ASKS - 1 };
        self.heard = rings;
    }

    /// The companion had something: there may be more.
    #[inline]
    pub(super) fn stay(&mut self) {
        self.asks = ASKS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A word that is no program's.
    fn ear() -> (Arc<SharedWords>, Ear) {
        let file = manylane_sys::shared::file(c"doorbell", 4096).unwrap();
        let rings = Arc::new(SharedWords::new(file.as_fd(), 1).unwrap());
        (Arc::clone(&rings), Ear::new(rings))
    }

    /// How often the companion is asked until there is silence.
    fn asked(ear: &mut Ear) -> u32 {
        let mut asked = 0;
        while ear.hears() {
            ear.answer();
            asked += 1;
        }
        asked
    }

    #[test]
    fn what_was_queued_before_is_asked_for() {
        let (_, mut ear) = ear();
        assert_eq!(asked(&mut ear), ASKS);
        assert_eq!(asked(&mut ear), 0, "silence");
    }

    #[test]
    fn each_ring_is_answered_and_what_comes_late_too() {
        let (rings, mut ear) = ear();
        asked(&mut ear);
        for ring in 1..=3 {
            rings.store(0, ring);
            assert_eq!(asked(&mut ear), ASKS);
        }
        // While it is asked.
        rings.store(0, 4);
        ear.answer();
        rings.store(0, 5);
        assert_eq!(asked(&mut ear), ASKS);
        // The counter begins anew after its last value.
        rings.store(0, u64::MAX);
        asked(&mut ear);
        rings.store(0, 0);
        assert_eq!(asked(&mut ear), ASKS);
    }

    #[test]
    fn a_companion_that_has_something_is_asked_until_it_has_nothing() {
        let (rings, mut ear) = ear();
        asked(&mut ear);
        rings.store(0, 1000);
        for _ in 0..20 {
            assert!(ear.hears());
            ear.answer();
            ear.stay();
        }
        assert_eq!(asked(&mut ear), ASKS);
    }
}
