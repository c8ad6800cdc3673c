//! The timer wheel against a map of deadlines.

use std::collections::BTreeMap;

use manylane_tcp::time::Time;
use manylane_tcp::wheel::Wheel;
use proptest::prelude::*;

const KEYS: u32 = 40;
const LEVELS: usize = 11;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Sets a deadline that is this far from the current time.
    Set(u32, u64),
    /// Sets a deadline that passed so long ago.
    SetPast(u32, u64),
    Cancel(u32),
    /// Lets time pass, and removes all keys that are due.
    Drain(u64),
    /// Lets time pass, and removes one key: others may stay due.
    PopOne(u64),
    /// Passes a time from the past, and removes all keys that are due.
    DrainPast(u64),
}

/// The wheel, and what it should contain.
struct Pair {
    wheel: Wheel,
    model: BTreeMap<u32, Time>,
    now: Time,
}

impl Pair {
    fn new(now: Time) -> Pair {
        Pair { wheel: Wheel::new(now), model: BTreeMap::new(), now }
    }

    fn set(&mut self, key: u32, at: Time) {
        self.wheel.set(key, at);
        self.model.insert(key, at);
    }

    fn cancel(&mut self, key: u32) {
        self.wheel.cancel(key);
        self.model.remove(&key);
    }

    fn earliest(&self) -> Option<Time> {
        self.model.values().min().copied()
    }

    /// Removes a key, which must be due; if there is none, then none must be due.
    fn pop(&mut self, now: Time) -> bool {
        let Some(key) = self.wheel.pop(now) else {
            assert!(self.earliest().is_none_or(|at| at > self.now), "a key is missing");
            return false;
        };
        let at = self.model.remove(&key).expect("popped twice or never set");
        assert!(at <= self.now, "early: {at:?} at {:?}", self.now);
        true
    }

    fn drain(&mut self, now: Time) {
        while self.pop(now) {}
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Set(key, after) => self.set(key, Time(self.now.0.saturating_add(after))),
            Step::SetPast(key, ago) => self.set(key, Time(self.now.0.saturating_sub(ago))),
            Step::Cancel(key) => self.cancel(key),
            Step::Drain(after) => {
                self.now.0 = self.now.0.saturating_add(after);
                self.drain(self.now);
            }
            Step::PopOne(after) => {
                self.now.0 = self.now.0.saturating_add(after);
                self.pop(self.now);
            }
            Step::DrainPast(ago) => self.drain(Time(self.now.0.saturating_sub(ago))),
        }
    }

    fn check(&self) {
        for key in 0..=KEYS {
            assert_eq!(self.wheel.deadline(key), self.model.get(&key).copied());
        }
        assert_eq!(self.wheel.next().is_some(), !self.model.is_empty());
        assert!(self.wheel.next() <= self.earliest(), "next() would be late");
    }

    /// Sleeps until each next(), to the last deadline. Returns the number of wakes.
    fn sleep_until_empty(&mut self) -> usize {
        let mut wakes = 0;
        while let Some(next) = self.wheel.next() {
            wakes += 1;
            assert!(wakes <= 1000, "no progress");
            self.now = self.now.max(next);
            self.drain(self.now);
            self.check();
        }
        assert!(self.model.is_empty());
        wakes
    }
}

/// Spans of all lengths: any number of bits is equally likely.
fn span() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(u64::MAX), (0..64u32, any::<u64>()).prop_map(|(bits, n)| n >> bits)]
}

/// Spans that leave time for many steps before the end of time.
fn short_span() -> impl Strategy<Value = u64> {
    (24..64u32, any::<u64>()).prop_map(|(bits, n)| n >> bits)
}

fn step(span: impl Strategy<Value = u64> + Clone + 'static) -> impl Strategy<Value = Step> {
    let key = 0..KEYS;
    prop_oneof![
        8 => (key.clone(), span.clone()).prop_map(|(key, after)| Step::Set(key, after)),
        1 => (key.clone(), span.clone()).prop_map(|(key, ago)| Step::SetPast(key, ago)),
        2 => key.prop_map(Step::Cancel),
        3 => span.clone().prop_map(Step::Drain),
        2 => span.clone().prop_map(Step::PopOne),
        1 => span.prop_map(Step::DrainPast),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let short = step(short_span().boxed());
    let any = step(span().boxed());
    prop_oneof![
        prop::collection::vec(short, 1..200),
        // Few steps: a single long one may reach the end of time.
        prop::collection::vec(any, 1..20),
    ]
}

/// Times at the borders of slots and of all time, and between them.
fn start() -> impl Strategy<Value = Time> {
    let border = (0..64u32, 0..3u64).prop_map(|(bit, n)| (1 << bit) - 1 + n);
    prop_oneof![Just(0), border, any::<u64>(), Just(u64::MAX)].prop_map(Time)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn agrees_with_a_map(start in start(), steps in steps()) {
        let mut pair = Pair::new(start);
        for step in steps {
            pair.take(step);
            pair.check();
        }
        pair.sleep_until_empty();
    }

    #[test]
    fn wakes_at_most_once_per_level(start in start(), spans in prop::collection::vec(span(), 1..40)) {
        let mut pair = Pair::new(start);
        for (key, span) in (0..).zip(&spans) {
            pair.set(key, Time(start.0.saturating_add(*span)));
        }
        prop_assert!(pair.sleep_until_empty() <= spans.len() * LEVELS);
    }

    #[test]
    fn wakes_once_for_one_deadline(start in start(), span in span()) {
        let mut pair = Pair::new(start);
        pair.set(0, Time(start.0.saturating_add(span)));
        prop_assert_eq!(pair.sleep_until_empty(), 1);
    }
}

#[test]
fn a_deadline_in_the_past_is_due_at_once() {
    let mut wheel = Wheel::new(Time(1_000_000));
    wheel.set(3, Time(5));
    assert_eq!(wheel.deadline(3), Some(Time(5)));
    assert!(wheel.next().unwrap() <= Time(5));
    assert_eq!(wheel.pop(Time(1_000_000)), Some(3));
    assert_eq!(wheel.pop(Time(1_000_000)), None);
    assert_eq!(wheel.next(), None);
}

#[test]
fn a_deadline_is_exact() {
    let mut wheel = Wheel::new(Time(0));
    wheel.set(0, Time(200_000));
    wheel.set(1, Time(200_001));
    assert_eq!(wheel.pop(Time(199_999)), None);
    assert_eq!(wheel.pop(Time(200_000)), Some(0));
    assert_eq!(wheel.pop(Time(200_000)), None);
    assert_eq!(wheel.pop(Time(200_001)), Some(1));
}

#[test]
fn a_key_that_is_due_can_be_cancelled_and_moved() {
    let mut wheel = Wheel::new(Time(0));
    for key in 0..4 {
        wheel.set(key, Time(10 + u64::from(key)));
    }
    assert_eq!(wheel.pop(Time(100)), Some(0));
    wheel.cancel(1);
    wheel.set(2, Time(150));
    assert_eq!(wheel.pop(Time(100)), Some(3));
    assert_eq!(wheel.pop(Time(100)), None);
    assert_eq!(wheel.pop(Time(150)), Some(2));
    assert_eq!(wheel.next(), None);
}

#[test]
fn a_key_set_while_others_are_popped_is_popped_too() {
    let mut wheel = Wheel::new(Time(0));
    wheel.set(0, Time(10));
    assert_eq!(wheel.pop(Time(100)), Some(0));
    wheel.set(0, Time(100));
    wheel.set(1, Time(101));
    assert_eq!(wheel.pop(Time(100)), Some(0));
    assert_eq!(wheel.pop(Time(100)), None);
    assert_eq!(wheel.deadline(1), Some(Time(101)));
}

#[test]
fn the_end_of_time_is_a_deadline() {
    let mut wheel = Wheel::new(Time(0));
    wheel.set(0, Time(u64::MAX));
    assert_eq!(wheel.deadline(0), Some(Time(u64::MAX)));
    assert_eq!(wheel.pop(Time(u64::MAX - 1)), None);
    assert_eq!(wheel.next(), Some(Time(u64::MAX)));
    assert_eq!(wheel.pop(Time(u64::MAX)), Some(0));
    wheel.set(0, Time(u64::MAX));
    assert_eq!(wheel.pop(Time(u64::MAX)), Some(0));
    assert_eq!(wheel.pop(Time(u64::MAX)), None);
}

#[test]
fn a_key_is_used_again() {
    let mut wheel = Wheel::new(Time(0));
    for round in 1..100 {
        wheel.set(7, Time(round * 1000));
        wheel.set(7, Time(round * 1000 + 1));
        assert_eq!(wheel.pop(Time(round * 1000)), None);
        assert_eq!(wheel.pop(Time(round * 1000 + 1)), Some(7));
        wheel.set(7, Time(round * 1_000_000));
        wheel.cancel(7);
        wheel.cancel(7);
        assert_eq!(wheel.next(), None);
    }
}

#[test]
fn unknown_keys_have_no_deadline() {
    let mut wheel = Wheel::new(Time(0));
    for key in [0, 1, u32::MAX] {
        wheel.cancel(key);
        assert_eq!(wheel.deadline(key), None);
    }
}
