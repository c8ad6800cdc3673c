//! What the stack under a lane counts. The lane's thread copies it for other threads to read, at
//! most ten times a second: nothing is shared for a segment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use manylane::tcp::Time;
use manylane_sys::cpu;

/// Time between two copies.
const INTERVAL: Duration = Duration::from_millis(100);

/// A counter or a level of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Its name.
    pub name: &'static str,
    /// True for a level, which may fall; false for a count since the start.
    pub is_level: bool,
    /// Its value.
    pub value: u64,
}

impl Stat {
    /// A count since the start.
    pub(crate) fn count(name: &'static str, value: u64) -> Stat {
        Stat { name, is_level: false, value }
    }

    /// A value that there is now.
    pub(crate) fn level(name: &'static str, value: usize) -> Stat {
        Stat { name, is_level: true, value: value as u64 }
    }
}

/// The counters and levels of one lane's stack, which its thread publishes.
#[derive(Debug, Default)]
pub struct StackStats {
    /// The thread that serves the lane; zero before it does.
    thread: AtomicU64,
    stats: Box<[Published]>,
}

#[derive(Debug)]
struct Published {
    name: &'static str,
    is_level: bool,
    value: AtomicU64,
}

impl StackStats {
    pub(crate) fn new(stats: impl FnOnce(&mut dyn FnMut(Stat))) -> StackStats {
        let mut published = Vec::new();
        stats(&mut |Stat { name, is_level, value }| {
            published.push(Published { name, is_level, value: value.into() });
        });
        StackStats { thread: AtomicU64::new(0), stats: published.into() }
    }

    /// Their values, at most a tenth of a second old.
    pub fn iter(&self) -> impl Iterator<Item = Stat> {
        self.stats.iter().map(|stat| Stat {
            name: stat.name,
            is_level: stat.is_level,
            value: stat.value.load(Ordering::Relaxed),
        })
    }

    /// The thread that serves the lane, once it does.
    #[must_use]
    pub fn thread(&self) -> Option<u64> {
        Some(self.thread.load(Ordering::Relaxed)).filter(|thread| *thread > 0)
    }

    /// The calling thread serves the lane.
    pub(crate) fn set_thread(&self) {
        self.thread.store(u64::try_from(cpu::thread_id()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Stores new values: the same ones in the same order as those of [`new`](Self::new). Only the
    /// thread of the lane calls it.
    pub(crate) fn publish(&self, stats: impl FnOnce(&mut dyn FnMut(Stat))) {
        let mut published = self.stats.iter();
        stats(&mut |stat| {
            if let Some(published) = published.next() {
                debug_assert_eq!(published.name, stat.name);
                published.value.store(stat.value, Ordering::Relaxed);
            }
        });
    }
}

/// When a lane publishes.
#[derive(Debug)]
pub(crate) struct Schedule {
    due: Time,
}

impl Schedule {
    pub(crate) fn new(now: Time) -> Schedule {
        Schedule { due: now }
    }

    /// Publishes if it is time to.
    #[inline]
    pub(crate) fn publish(&mut self, now: Time, to: &StackStats, stats: impl FnOnce(&mut dyn FnMut(Stat))) {
        if now >= self.due {
            self.due = now + INTERVAL;
            to.publish(stats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_published_ten_times_a_second_at_most() {
        let at = |value: u64| {
            move |put: &mut dyn FnMut(Stat)| {
                put(Stat::count("segments_in", value));
                put(Stat::level("connections", 3));
            }
        };
        let stats = StackStats::new(at(0));
        let mut schedule = Schedule::new(Time(0));
        let seen = || stats.iter().next().unwrap().value;
        let mut publish = |millis: u64| schedule.publish(Time(millis * 1000), &stats, at(millis));
        publish(1);
        assert_eq!(seen(), 1);
        publish(100);
        assert_eq!(seen(), 1);
        publish(101);
        assert_eq!(seen(), 101);
        stats.publish(at(102));
        let names: Vec<_> = stats.iter().map(|stat| (stat.name, stat.is_level, stat.value)).collect();
        assert_eq!(names, [("segments_in", false, 102), ("connections", true, 3)]);
        assert_eq!(stats.thread(), None);
        stats.set_thread();
        assert!(stats.thread().is_some());
    }
}
