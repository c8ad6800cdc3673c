//! The doorbell of companions: whether one may have something, known without a system call.
//!
//! To ask a companion is a system call, and after a pause nothing that it needs in the kernel is in the cache. A lane whose queues
//! are busy could ask seldom only, and most of the time there is nothing. So a filter on the socket (`bpf/doorbell.bpf.c`)
//! moves a word that is mapped here when something is about to be queued, and the lane asks only if that has moved.
//!
//! | event | what happens |
//! |---|---|
//! | the kernel queues a datagram | it runs the filter first: the word moves, if a lane has heard it since it did |
//! | a lane's turn comes to look | a load; if the word has moved, the companion is asked, and some more times after that |
//! | a lane hears that it has moved | it writes that to the other word, which the filter reads |
//! | the queues of a lane are empty | its companion is asked, or wakes the lane: no word is needed |
//! | no doorbell (before Linux 5.5) | the companion is asked each time that its turn comes |
//!
//! One word serves all companions of a socket: a lane may ask in vain because another one's companion got something. It is then
//! no worse off than without. It is written once for each time that a lane hears it and not for each datagram, so that traffic
//! to several companions shares no line that is written all the time. Nothing is missed by that: no lane has heard more than what the
//! other word says, so a word that is ahead of that is news for all of them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use aya::EbpfLoader;
use aya::maps::Map;
use aya::programs::{ProgramFd, SocketFilter};
use manylane_bpf::abi;
use manylane_sys::map::SharedWords;
use manylane_sys::sock;

use crate::verify::verified;

/// How often a companion is asked after the word has moved: the datagram is queued a moment after that, and others may wait
/// behind the batch that was taken.
const ASKS: u32 = 4;

/// The program and its word.
pub(super) struct Doorbell {
    program: ProgramFd,
    bell: Arc<SharedWords>,
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
        let Some(Map::Array(bell)) = ebpf.take_map("ml_bell") else {
            return Err("the eBPF object has no array ml_bell".into());
        };
        Ok(Self { program, bell: Arc::new(SharedWords::new(bell.fd().as_fd(), abi::BELL_WORDS)?) })
    }

    /// Has the doorbell ring for a companion, instead of whatever filter that has. Needs no privilege.
    ///
    /// # Errors
    /// What `setsockopt(2)` reports.
    pub(super) fn hang(&self, companion: BorrowedFd<'_>) -> io::Result<Ear> {
        sock::attach_filter(companion, self.program.as_fd())?;
        Ok(Ear::new(Arc::clone(&self.bell)))
    }
}

/// What a lane has heard of the doorbell.
#[derive(Debug)]
pub(super) struct Ear {
    bell: Arc<SharedWords>,
    heard: u64,
    /// So many times the companion is to be asked, whether the word moves or not.
    asks: u32,
}

impl Ear {
    /// Of a companion that may have something already.
    fn new(bell: Arc<SharedWords>) -> Self {
        let heard = bell.load(abi::BELL_RINGS);
        let mut ear = Self { bell, heard, asks: ASKS };
        ear.hear(heard);
        ear
    }

    /// The word is such: what comes from here on moves it.
    fn hear(&mut self, rings: u64) {
        self.heard = rings;
        // Not back, should another lane have heard more.
        self.bell.raise(abi::BELL_HEARD, rings);
    }

    /// Whether the companion may have something.
    #[inline]
    pub(super) fn hears(&self) -> bool {
        self.asks > 0 || self.bell.load(abi::BELL_RINGS) != self.heard
    }

    /// The companion is about to be asked. What rings from here on asks for it anew.
    #[inline]
    pub(super) fn answer(&mut self) {
        let rings = self.bell.load(abi::BELL_RINGS);
        if rings == self.heard {
            self.asks = self.asks.saturating_sub(1);
        } else {
            self.hear(rings);
            self.asks = ASKS - 1;
        }
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

    /// Words that are no program's.
    fn bell() -> Arc<SharedWords> {
        let file = manylane_sys::shared::file(c"doorbell", 4096).unwrap();
        Arc::new(SharedWords::new(file.as_fd(), abi::BELL_WORDS).unwrap())
    }

    /// As the filter does; whether the word moved.
    fn ring(bell: &SharedWords) -> bool {
        let rings = bell.load(abi::BELL_RINGS);
        let moves = rings == bell.load(abi::BELL_HEARD);
        bell.raise(abi::BELL_RINGS, rings + u64::from(moves));
        moves
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
        let mut ear = Ear::new(bell());
        assert_eq!(asked(&mut ear), ASKS);
        assert_eq!(asked(&mut ear), 0, "silence");
    }

    #[test]
    fn each_ring_is_answered_and_what_comes_late_too() {
        let bell = bell();
        let mut ear = Ear::new(Arc::clone(&bell));
        asked(&mut ear);
        for _ in 0..3 {
            assert!(ring(&bell));
            assert_eq!(asked(&mut ear), ASKS);
        }
        // While it is asked.
        ring(&bell);
        ear.answer();
        ring(&bell);
        assert_eq!(asked(&mut ear), ASKS);
    }

    #[test]
    fn the_word_moves_once_until_somebody_hears_it() {
        let bell = bell();
        let mut ear = Ear::new(Arc::clone(&bell));
        asked(&mut ear);
        assert_eq!((0..1000).filter(|_| ring(&bell)).count(), 1);
        assert_eq!(asked(&mut ear), ASKS);
        assert_eq!((0..1000).filter(|_| ring(&bell)).count(), 1);
    }

    #[test]
    fn lanes_that_hear_at_different_times_miss_nothing() {
        let bell = bell();
        ring(&bell);
        let mut ears = [0; 3].map(|_| Ear::new(Arc::clone(&bell)));
        ears.iter_mut().for_each(|ear| _ = asked(ear));
        // The turns of three lanes and of what comes for them, in every order of eight.
        for order in 0..4_u32.pow(8) {
            for step in 0..8 {
                match order / 4_u32.pow(step) % 4 {
                    3 => {
                        ring(&bell);
                        let heard = ears.iter().filter(|ear| ear.bell.load(abi::BELL_RINGS) != ear.heard);
                        assert_eq!(heard.count(), 3, "all hear what came for one of them: {order}");
                    }
                    lane => ears[lane as usize].answer(),
                }
            }
            ears.iter_mut().for_each(|ear| _ = asked(ear));
        }
    }

    #[test]
    fn a_lane_that_comes_late_hears_what_comes_for_it() {
        let bell = bell();
        // Nobody has heard these.
        bell.raise(abi::BELL_RINGS, 7);
        let mut ear = Ear::new(Arc::clone(&bell));
        asked(&mut ear);
        assert!(ring(&bell) && ear.hears());
        // Another one was slower, and takes nothing back.
        bell.raise(abi::BELL_HEARD, 3);
        asked(&mut ear);
        assert!(ring(&bell) && ear.hears());
    }

    #[test]
    fn a_companion_that_has_something_is_asked_until_it_has_nothing() {
        let bell = bell();
        let mut ear = Ear::new(Arc::clone(&bell));
        asked(&mut ear);
        ring(&bell);
        for _ in 0..20 {
            assert!(ear.hears());
            ear.answer();
            ear.stay();
        }
        assert_eq!(asked(&mut ear), ASKS);
    }
}
