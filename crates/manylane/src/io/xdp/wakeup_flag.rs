//! The doorbell of companions: whether one may have something, known without a system call.
//!
//! To ask a companion is a system call, and after a pause nothing that it needs in the kernel is in
//! the cache. A lane whose queues are busy could ask seldom only, and most of the time there is
//! nothing. So a filter on the socket (`bpf/doorbell.bpf.c`) moves a word that is mapped here when
//! something is about to be queued, and the lane asks only if that has moved.
//!
//! | event | what happens |
//! |---|---|
//! | the kernel queues a datagram | it runs the filter first: the word moves, if a lane has heard it since it did |
//! | a lane's turn comes to look | a load; if the word has moved, the companion is asked, and some more times after that |
//! | a lane hears that it has moved | it writes that to the other word, which the filter reads |
//! | the queues of a lane are empty | its companion is asked, or wakes the lane: no word is needed |
//! | no doorbell (before Linux 5.5) | the companion is asked each time that its turn comes |
//!
//! One word serves all companions of a socket: a lane may ask in vain because another one's
//! companion got something. It is then no worse off than without. It is written once for each time
//! that a lane hears it and not for each datagram, so that traffic to several companions shares no
//! line that is written all the time. Nothing is missed by that: no lane has heard more than what
//! the other word says, so a word that is ahead of that is news for all of them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use aya::EbpfLoader;
use aya::maps::Map;
use aya::programs::{ProgramFd, SocketFilter};
use manylane_bpf::abi;
use manylane_sys::map::SharedWords;
use manylane_sys::sock;

use crate::verify::load_with_retry;

/// How often a companion is asked after the word has moved: the datagram is queued a moment after
/// that, and others may wait behind the batch that was taken.
const POLLS_PER_WAKEUP: u32 = 4;

/// The program and its word.
pub(super) struct WakeupFlag {
    program: ProgramFd,
    words: Arc<SharedWords>,
}

impl WakeupFlag {
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
        load_with_retry(|| filter.load())?;
        let program = filter.fd()?.try_clone()?;
        let Some(Map::Array(bell)) = ebpf.take_map("ml_bell") else {
            return Err("the eBPF object has no array ml_bell".into());
        };
        Ok(Self { program, words: Arc::new(SharedWords::new(bell.fd().as_fd(), abi::WAKEUP_WORDS)?) })
    }

    /// Has the doorbell ring for a companion, instead of whatever filter that has. Needs no
    /// privilege.
    ///
    /// # Errors
    /// What `setsockopt(2)` reports.
    pub(super) fn attach(&self, companion: BorrowedFd<'_>) -> io::Result<WakeupReceiver> {
        sock::attach_filter(companion, self.program.as_fd())?;
        Ok(WakeupReceiver::new(Arc::clone(&self.words)))
    }
}

/// What a lane has heard of the doorbell.
#[derive(Debug)]
pub(super) struct WakeupReceiver {
    words: Arc<SharedWords>,
    acked: u64,
    /// So many times the companion is to be asked, whether the word moves or not.
    polls_left: u32,
}

impl WakeupReceiver {
    /// Of a companion that may have something already.
    fn new(bell: Arc<SharedWords>) -> Self {
        let heard = bell.load(abi::WAKEUP_SEQ);
        let mut flag = Self { words: bell, acked: heard, polls_left: POLLS_PER_WAKEUP };
        flag.set_acked(heard);
        flag
    }

    /// The word is such: what comes from here on moves it.
    fn set_acked(&mut self, rings: u64) {
        self.acked = rings;
        // Not back, should another lane have heard more.
        self.words.fetch_max(abi::WAKEUP_ACK, rings);
    }

    /// Whether the companion may have something.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.polls_left > 0 || self.words.load(abi::WAKEUP_SEQ) != self.acked
    }

    /// The companion is about to be asked. What rings from here on asks for it anew.
    #[inline]
    pub(super) fn ack(&mut self) {
        let rings = self.words.load(abi::WAKEUP_SEQ);
        if rings == self.acked {
            self.polls_left = self.polls_left.saturating_sub(1);
        } else {
            self.set_acked(rings);
            self.polls_left = POLLS_PER_WAKEUP - 1;
        }
    }

    /// The companion had something: there may be more.
    #[inline]
    pub(super) fn rearm(&mut self) {
        self.polls_left = POLLS_PER_WAKEUP;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words that are no program's.
    fn shared_words() -> Arc<SharedWords> {
        let file = manylane_sys::shared::sealed_memfd(c"doorbell", 4096).unwrap();
        Arc::new(SharedWords::new(file.as_fd(), abi::WAKEUP_WORDS).unwrap())
    }

    /// As the filter does; whether the word moved.
    fn notify(bell: &SharedWords) -> bool {
        let rings = bell.load(abi::WAKEUP_SEQ);
        let moves = rings == bell.load(abi::WAKEUP_ACK);
        bell.fetch_max(abi::WAKEUP_SEQ, rings + u64::from(moves));
        moves
    }

    /// How often the companion is asked until there is silence.
    fn drain(flag: &mut WakeupReceiver) -> u32 {
        let mut asked = 0;
        while flag.is_pending() {
            flag.ack();
            asked += 1;
        }
        asked
    }

    #[test]
    fn what_was_queued_before_is_asked_for() {
        let mut flag = WakeupReceiver::new(shared_words());
        assert_eq!(drain(&mut flag), POLLS_PER_WAKEUP);
        assert_eq!(drain(&mut flag), 0, "silence");
    }

    #[test]
    fn each_ring_is_answered_and_what_comes_late_too() {
        let bell = shared_words();
        let mut flag = WakeupReceiver::new(Arc::clone(&bell));
        drain(&mut flag);
        for _ in 0..3 {
            assert!(notify(&bell));
            assert_eq!(drain(&mut flag), POLLS_PER_WAKEUP);
        }
        // While it is asked.
        notify(&bell);
        flag.ack();
        notify(&bell);
        assert_eq!(drain(&mut flag), POLLS_PER_WAKEUP);
    }

    #[test]
    fn the_word_moves_once_until_somebody_hears_it() {
        let bell = shared_words();
        let mut flag = WakeupReceiver::new(Arc::clone(&bell));
        drain(&mut flag);
        assert_eq!((0..1000).filter(|_| notify(&bell)).count(), 1);
        assert_eq!(drain(&mut flag), POLLS_PER_WAKEUP);
        assert_eq!((0..1000).filter(|_| notify(&bell)).count(), 1);
    }

    #[test]
    fn lanes_that_hear_at_different_times_miss_nothing() {
        let bell = shared_words();
        notify(&bell);
        let mut flags = [0; 3].map(|_| WakeupReceiver::new(Arc::clone(&bell)));
        flags.iter_mut().for_each(|flag| _ = drain(flag));
        // The turns of three lanes and of what comes for them, in every order of eight.
        for order in 0..4_u32.pow(8) {
            for step in 0..8 {
                match order / 4_u32.pow(step) % 4 {
                    3 => {
                        notify(&bell);
                        let heard =
                            flags.iter().filter(|flag| flag.words.load(abi::WAKEUP_SEQ) != flag.acked);
                        assert_eq!(heard.count(), 3, "all hear what came for one of them: {order}");
                    }
                    lane => flags[lane as usize].ack(),
                }
            }
            flags.iter_mut().for_each(|flag| _ = drain(flag));
        }
    }

    #[test]
    fn a_lane_that_comes_late_hears_what_comes_for_it() {
        let bell = shared_words();
        // Nobody has heard these.
        bell.fetch_max(abi::WAKEUP_SEQ, 7);
        let mut flag = WakeupReceiver::new(Arc::clone(&bell));
        drain(&mut flag);
        assert!(notify(&bell) && flag.is_pending());
        // Another one was slower, and takes nothing back.
        bell.fetch_max(abi::WAKEUP_ACK, 3);
        drain(&mut flag);
        assert!(notify(&bell) && flag.is_pending());
    }

    #[test]
    fn a_companion_that_has_something_is_asked_until_it_has_nothing() {
        let bell = shared_words();
        let mut flag = WakeupReceiver::new(Arc::clone(&bell));
        drain(&mut flag);
        notify(&bell);
        for _ in 0..20 {
            assert!(flag.is_pending());
            flag.ack();
            flag.rearm();
        }
        assert_eq!(drain(&mut flag), POLLS_PER_WAKEUP);
    }
}
