//! The decision under a clock of the tests' own: a lane that does as it says, and requests at known times.

use proptest::prelude::*;

use super::*;

/// What the lane of the tests takes to handle a batch, in nanoseconds, and by how much its sleeps end late.
const WORK: u64 = 5_000;
const LATENESS: [u64; 3] = [4_000, 12_000, 28_000];
/// How long a lane that serves sleeps at most.
const IDLE: u64 = 20_000_000;

/// What a lane did.
#[derive(Debug, Default)]
struct Did {
    handled: usize,
    /// Came while it was looking.
    seen: usize,
    looked: u64,
    sleeps: u64,
    /// What it kept a processor for: work, looks, and sleeps. One that a timer ends costs as long as it ends late.
    busy: u64,
    /// Until when it ran.
    time: u64,
}

/// A lane, and the clock.
struct Lane {
    pacer: Pacer,
    now: u64,
    late: u64,
}

impl Lane {
    fn new(late: u64) -> Self {
        Self { pacer: Pacer::new(WaitPolicy::Adaptive), now: 0, late }
    }

    /// Sleeps until `next`, for so long at most; whether it has come.
    fn sleep(&mut self, next: u64, most: u64, did: &mut Did) -> bool {
        did.sleeps += 1;
        let woken = next <= self.now + most;
        did.busy += if woken { self.late / 3 } else { self.late };
        self.now = if woken { self.now.max(next) } else { self.now + most } + self.late;
        woken
    }

    /// Has the lane wait for requests at these times from now, and then for nothing until `end`.
    fn run(&mut self, requests: impl IntoIterator<Item = u64>, end: u64) -> Did {
        let (mut did, start) = (Did::default(), self.now);
        let time = Duration::from_nanos;
        let mut requests = requests.into_iter().map(|at| start + at).peekable();
        while self.now < start + end {
            // A batch is all that is there.
            let before = did.handled;
            if self.pacer.may_look() {
                while requests.next_if(|&at| at <= self.now).is_some() {
                    did.handled += 1;
                }
                if did.handled > before {
                    self.now += WORK;
                    continue;
                }
            }
            let next = requests.peek().copied().unwrap_or(u64::MAX);
            let met = if self.pacer.may_look() {
                self.wait(next, &mut did)
            } else {
                self.sleep(next, IDLE, &mut did).then_some(Met::Asleep)
            };
            let Some(met) = met else {
                self.pacer.gave_up();
                continue;
            };
            while requests.next_if(|&at| at <= self.now).is_some() {
                did.handled += 1;
            }
            self.pacer.came(time(self.now), met);
            self.now += WORK;
        }
        did.time = self.now - start;
        did.busy += did.looked + did.handled as u64 * WORK;
        did
    }

    /// Does in a wait for `next` as the plan says.
    fn wait(&mut self, next: u64, did: &mut Did) -> Option<Met> {
        let begin = self.now;
        let plan = self.pacer.plan(Duration::from_nanos(begin));
        let (rest, until) = (plan.rest.as_nanos() as u64, plan.until.as_nanos() as u64);
        assert!(rest <= until && until - rest <= STRETCH + STUMBLE, "{plan:?}");
        if rest > 0 {
            if self.sleep(next, rest, did) {
                return Some(Met::Asleep);
            }
            self.pacer.overslept(Duration::from_nanos(self.now - begin - rest));
        }
        if rest > 0 && next <= self.now {
            // It came before the end of the rest.
            return Some(Met::Asleep);
        }
        let found = next <= (begin + until).max(self.now);
        if until > rest {
            let to = if found { next } else { begin + until }.max(self.now);
            did.looked += to - self.now;
            did.seen += usize::from(found);
            self.now = to;
            if found {
                return Some(Met::Awake);
            }
        }
        self.sleep(next, IDLE, did).then_some(Met::Asleep)
    }
}

fn every(nanos: u64, count: usize) -> impl Iterator<Item = u64> {
    (1..=count as u64).map(move |number| number * nanos)
}

/// Moments that a memoryless source makes, from a generator of random numbers.
fn by_chance(mean: f64, count: usize) -> Vec<u64> {
    let (mut state, mut at) = (88_172_645_463_325_252_u64, 0.0);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let share = ((state >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
        at -= mean * share.ln();
        at as u64
    };
    (0..count).map(next).collect()
}

#[test]
fn an_idle_lane_does_not_look() {
    const MINUTE: u64 = 60_000_000_000;
    for late in LATENESS {
        let did = Lane::new(late).run([], MINUTE);
        assert!(did.looked == 0 && did.sleeps <= MINUTE / IDLE, "{did:?}");
        // Nor does one that was busy before: it looks once, for a stretch at most.
        let mut lane = Lane::new(late);
        let busy = lane.run(every(10_000, 10_000), 100_000_000);
        assert!(busy.seen > 9_000, "{busy:?}");
        let did = lane.run([], MINUTE);
        assert!(did.looked <= STRETCH && did.sleeps <= MINUTE / IDLE + 2, "{did:?}");
        // Its looks and wake-ups, at a generous 20 µs, are together far less than a hundredth of a core.
        assert!((did.looked + did.sleeps * 20_000) * 100 < did.time, "{did:?}");
    }
}

// A lane that is woken later than the next request comes has them in pairs and more, and cannot know: it goes on to sleep, unless
// it looked before.
#[test]
fn requests_close_together_are_looked_for() {
    for late in &LATENESS[..2] {
        for gap in [7_000, 10_000, 25_000] {
            let did = Lane::new(*late).run(every(gap, 10_000), 10_000 * gap);
            assert!(did.handled >= 9_990 && did.seen >= 9_700, "every {gap} ns, {late} late: {did:?}");
        }
    }
}

#[test]
fn requests_at_even_distances_are_rested_for() {
    for late in LATENESS {
        for gap in [50_000, 100_000, 1_000_000, 10_000_000] {
            let did = Lane::new(late).run(every(gap, 10_000), 10_000 * gap);
            let told = format!("every {gap} ns, {late} late: {did:?}");
            assert!(did.handled >= 9_990 && did.looked * 5 < did.time && did.busy * 2 < did.time, "{told}");
            // Where rests cost what they save, it sleeps.
            let rests = late + WORK < gap / 2;
            if rests { assert!(did.seen > 9_800, "{told}") } else { assert!(did.seen < 1_000, "{told}") }
        }
    }
}

/// Requests in bursts: so many, so far apart, every so often.
fn in_bursts(count: u64, apart: u64, every: u64, bursts: u64) -> impl Iterator<Item = u64> {
    (1..=bursts).flat_map(move |burst| (0..count).map(move |number| burst * every + number * apart))
}

// 20,000 requests per second, however they follow each other: a lane that looked all the time would keep a processor busy.
#[test]
fn it_keeps_less_than_half_a_core_where_looking_would_take_a_whole_one() {
    const LENGTH: u64 = 500_000_000;
    for late in LATENESS {
        let even = Lane::new(late).run(every(50_000, 9_999), LENGTH);
        let chance = Lane::new(late).run(by_chance(50e3, 9_999), LENGTH);
        let bursts = Lane::new(late).run(in_bursts(8, 4_000, 400_000, 1_249), LENGTH);
        assert_eq!((even.handled, bursts.handled), (9_999, 9_992), "{late} late: {even:?} {bursts:?}");
        for (did, kind) in [(even, "even"), (chance, "by chance"), (bursts, "in bursts")] {
            assert!(did.busy * 100 < did.time * 45, "{kind}, {late} late: {did:?}");
            assert!(did.sleeps <= did.handled as u64 + LENGTH / IDLE, "{kind}, {late} late: {did:?}");
        }
    }
}

// As in a ping-pong, where the next request comes when the last one is answered: a client that stumbles now and then is not made to
// wait for a sleeper, too.
#[test]
fn a_short_stumble_is_looked_through() {
    let requests: Vec<u64> = (1..=10_000).map(|number| number * 13_000 + number / 80 * 40_000).collect();
    for late in &LATENESS[..2] {
        let did = Lane::new(*late).run(requests.clone(), requests[9_999]);
        // It has to know gaps first, and to have saved something, and then never sleeps.
        assert_eq!(did.handled, 10_000, "{late} late: {did:?}");
        assert!(did.sleeps <= 16 && did.seen >= 9_960, "{late} late: {did:?}");
    }
}

#[test]
fn two_long_stumbles_cost_a_sleep_each_and_no_more() {
    // Two in a row, every 400 requests; the first before anything could be saved up.
    let stumbles = |number: u64| (number + 390) / 400 + (number + 387) / 400;
    let requests: Vec<u64> =
        (1..=10_000).map(|number| number * 13_000 + stumbles(number) * 500_000).collect();
    for late in &LATENESS[..2] {
        let did = Lane::new(*late).run(requests.clone(), requests[9_999]);
        assert_eq!(did.handled, 10_000, "{late} late: {did:?}");
        assert!(did.sleeps <= 50 + 16, "{late} late: {did:?}");
    }
}

#[test]
fn a_machine_that_is_slow_for_a_while_is_rested_on_again() {
    let mut lane = Lane::new(28_000);
    let slow = lane.run(every(50_000, 10_000), 500_000_000);
    lane.late = 4_000;
    // It takes a while to find out, since it has no rests to learn from.
    lane.run(every(50_000, 5_000), 250_000_000);
    let quick = lane.run(every(50_000, 10_000), 500_000_000);
    assert!(slow.seen < 1_000 && quick.seen > 9_800, "{slow:?} {quick:?}");
    assert!(slow.busy * 2 < slow.time && quick.busy * 2 < quick.time, "{slow:?} {quick:?}");
}

#[test]
fn what_cannot_be_foreseen_is_slept_for() {
    for late in LATENESS {
        for mean in [100e3, 1e6] {
            let requests = by_chance(mean, 10_000);
            let end = *requests.last().unwrap();
            let did = Lane::new(late).run(requests, end);
            assert!(did.looked * 20 < did.time, "{mean} ns, {late} late: {did:?}");
        }
        // Close together it pays all the same.
        let requests = by_chance(8e3, 10_000);
        let end = *requests.last().unwrap();
        let did = Lane::new(late).run(requests, end);
        assert!(did.sleeps < 1_500, "{late} late: {did:?}");
    }
}

#[test]
fn it_takes_a_change_in_its_stride() {
    for late in &LATENESS[..2] {
        let mut lane = Lane::new(*late);
        let before = lane.run(every(10_000, 1_000), 10_000_000);
        let after = lane.run(every(50_000, 1_000), 50_000_000);
        let again = lane.run(every(10_000, 1_000), 10_000_000);
        assert!(before.seen > 750 && again.seen > 900, "{late} late: {before:?} {again:?}");
        assert!(after.looked * 3 < after.time && after.seen > 900, "{late} late: {after:?}");
    }
}

#[test]
fn who_was_late_once_is_not_late_for_ever() {
    // Each thousandth comes when nobody could know.
    let requests =
        (1..=10_000_u64).map(|number| number * 50_000 - if number % 1_000 == 0 { 25_000 } else { 0 });
    for late in &LATENESS[..2] {
        let did = Lane::new(*late).run(requests.clone(), 500_000_000);
        assert!(did.seen > 9_700, "{late} late: {did:?}");
    }
}

#[test]
fn the_other_policies_do_as_they_are_told() {
    let micros = Duration::from_micros;
    let mut spin = Pacer::new(WaitPolicy::Spin(micros(70)));
    for now in [0, 10, 100_000] {
        assert!(spin.may_look() && !spin.learns());
        assert_eq!(spin.plan(micros(now)), Plan { rest: Duration::ZERO, until: micros(70) });
        spin.came(micros(now), Met::Asleep);
        spin.gave_up();
    }
    for policy in [WaitPolicy::Sleep, WaitPolicy::BusyPoll(micros(50))] {
        assert!(!Pacer::new(policy).may_look());
    }
}

proptest! {
    /// Whatever comes: everything is handled, and looking costs no more for each batch than a stretch.
    #[test]
    fn looking_is_bounded_by_what_comes(
        gaps in prop::collection::vec(0_u64..2_000_000, 0..500),
        late in 0_u64..60_000,
    ) {
        let requests: Vec<u64> = gaps.iter().scan(0, |at, gap| { *at += gap; Some(*at) }).collect();
        let end = requests.last().copied().unwrap_or(0) + 5 * IDLE;
        let did = Lane::new(late).run(requests.clone(), end);
        prop_assert_eq!(did.handled, requests.len());
        prop_assert!(did.looked <= (STRETCH + STUMBLE) * (requests.len() as u64 + 1), "{:?}", did);
        prop_assert!(did.sleeps <= end / IDLE + 2 * requests.len() as u64 + 2, "{:?}", did);
    }

    /// A plan is made at any time of any history without a fault, and what it would have cost is within what pays.
    #[test]
    fn any_history_makes_a_plan(
        times in prop::collection::vec((any::<u64>(), any::<bool>()), 0..40),
        late in prop::collection::vec(any::<u64>(), 0..20),
        now in any::<u64>(),
    ) {
        let mut pacer = Pacer::new(WaitPolicy::Adaptive);
        late.iter().for_each(|&by| pacer.overslept(Duration::from_nanos(by)));
        for &(time, awake) in &times {
            pacer.came(Duration::from_nanos(time), if awake { Met::Awake } else { Met::Asleep });
        }
        let Plan { rest, until } = pacer.plan(Duration::from_nanos(now));
        prop_assert!(rest <= until && until - rest <= Duration::from_nanos(STRETCH + STUMBLE));
    }
}
