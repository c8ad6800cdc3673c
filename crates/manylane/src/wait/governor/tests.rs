//! The governor on a simulated clock: a lane that executes its plans, and requests at known times.

use proptest::prelude::*;

use super::*;

/// Time that the simulated lane takes to handle a batch, in nanoseconds, and the lateness of its
/// sleeps.
const WORK_NANOS: u64 = 5_000;
const WAKE_LATENCIES_NANOS: [u64; 3] = [4_000, 12_000, 28_000];
/// Longest sleep of a lane in `serve`.
const IDLE_SLEEP_NANOS_MAX: u64 = 20_000_000;

/// Record of the simulated lane.
#[derive(Debug, Default)]
struct Outcome {
    handled: usize,
    /// Requests that arrived while it polled.
    polled: usize,
    spin_time: u64,
    sleeps: u64,
    /// CPU time: work, polls, and sleeps. A sleep that a timer ends costs as much as it ends late.
    cpu_time: u64,
    /// Simulated time that it ran.
    elapsed: u64,
}

/// A lane, and the clock.
struct Lane {
    pacer: WaitGovernor,
    now: u64,
    wake_latency: u64,
}

impl Lane {
    fn new(late: u64) -> Self {
        Self { pacer: WaitGovernor::new(WaitPolicy::Adaptive), now: 0, wake_latency: late }
    }

    /// Sleeps until `next`, for at most `max`; true if the request has arrived.
    fn sleep(&mut self, next: u64, max: u64, did: &mut Outcome) -> bool {
        did.sleeps += 1;
        let woken = next <= self.now + max;
        did.cpu_time += if woken { self.wake_latency / 3 } else { self.wake_latency };
        self.now = if woken { self.now.max(next) } else { self.now + max } + self.wake_latency;
        woken
    }

    /// Runs the lane with requests at these times from the current time, and then without any
    /// until `end`.
    fn run(&mut self, requests: impl IntoIterator<Item = u64>, end: u64) -> Outcome {
        let (mut did, start) = (Outcome::default(), self.now);
        let time = Duration::from_nanos;
        let mut requests = requests.into_iter().map(|at| start + at).peekable();
        while self.now < start + end {
            // A batch has all queued requests.
            let before = did.handled;
            if self.pacer.can_spin() {
                while requests.next_if(|&at| at <= self.now).is_some() {
                    did.handled += 1;
                }
                if did.handled > before {
                    self.now += WORK_NANOS;
                    continue;
                }
            }
            let next = requests.peek().copied().unwrap_or(u64::MAX);
            let met = if self.pacer.can_spin() {
                self.wait(next, &mut did)
            } else {
                self.sleep(next, IDLE_SLEEP_NANOS_MAX, &mut did).then_some(Arrival::Woken)
            };
            let Some(met) = met else {
                self.pacer.record_timeout();
                continue;
            };
            while requests.next_if(|&at| at <= self.now).is_some() {
                did.handled += 1;
            }
            self.pacer.record_arrival(time(self.now), met);
            self.now += WORK_NANOS;
        }
        did.elapsed = self.now - start;
        did.cpu_time += did.spin_time + did.handled as u64 * WORK_NANOS;
        did
    }

    /// Executes the plan of a wait for `next`.
    fn wait(&mut self, next: u64, did: &mut Outcome) -> Option<Arrival> {
        let begin = self.now;
        let plan = self.pacer.plan(Duration::from_nanos(begin));
        let (sleep, until) = (plan.sleep_until.as_nanos() as u64, plan.spin_until.as_nanos() as u64);
        assert!(sleep <= until && until - sleep <= SPIN_NANOS_MAX + WAKE_LATENCY_NANOS_MAX, "{plan:?}");
        if sleep > 0 {
            if self.sleep(next, sleep, did) {
                return Some(Arrival::Woken);
            }
            self.pacer.record_wake_latency(Duration::from_nanos(self.now - begin - sleep));
        }
        if sleep > 0 && next <= self.now {
            // The request arrived before the end of the precise sleep.
            return Some(Arrival::Woken);
        }
        let found = next <= (begin + until).max(self.now);
        if until > sleep {
            let to = if found { next } else { begin + until }.max(self.now);
            did.spin_time += to - self.now;
            did.polled += usize::from(found);
            self.now = to;
            if found {
                return Some(Arrival::Polled);
            }
        }
        self.sleep(next, IDLE_SLEEP_NANOS_MAX, did).then_some(Arrival::Woken)
    }
}

fn every(nanos: u64, count: usize) -> impl Iterator<Item = u64> {
    (1..=count as u64).map(move |number| number * nanos)
}

/// Arrival times of a Poisson process, from a generator of random numbers.
fn poisson(mean: f64, count: usize) -> Vec<u64> {
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
fn an_idle_lane_does_not_poll() {
    const MINUTE_NANOS: u64 = 60_000_000_000;
    for late in WAKE_LATENCIES_NANOS {
        let did = Lane::new(late).run([], MINUTE_NANOS);
        assert!(did.spin_time == 0 && did.sleeps <= MINUTE_NANOS / IDLE_SLEEP_NANOS_MAX, "{did:?}");
        // Nor does a lane that was busy before: it polls once, for the maximum of one wait.
        let mut lane = Lane::new(late);
        let busy = lane.run(every(10_000, 10_000), 100_000_000);
        assert!(busy.polled > 9_000, "{busy:?}");
        let did = lane.run([], MINUTE_NANOS);
        assert!(
            did.spin_time <= SPIN_NANOS_MAX && did.sleeps <= MINUTE_NANOS / IDLE_SLEEP_NANOS_MAX + 2,
            "{did:?}"
        );
        // Polls and wake-ups, at a generous 20 µs, take far less than a hundredth of a CPU
        // together.
        assert!((did.spin_time + did.sleeps * 20_000) * 100 < did.elapsed, "{did:?}");
    }
}

// A lane that wakes up after the next request has arrived receives several at once, and cannot
// learn the gap: it keeps sleeping, unless it polled before.
#[test]
fn dense_requests_are_polled_for() {
    for late in &WAKE_LATENCIES_NANOS[..2] {
        for gap in [7_000, 10_000, 25_000] {
            let did = Lane::new(*late).run(every(gap, 10_000), 10_000 * gap);
            assert!(did.handled >= 9_990 && did.polled >= 9_700, "every {gap} ns, {late} late: {did:?}");
        }
    }
}

#[test]
fn regular_requests_are_slept_for() {
    for late in WAKE_LATENCIES_NANOS {
        for gap in [50_000, 100_000, 1_000_000, 10_000_000] {
            let did = Lane::new(late).run(every(gap, 10_000), 10_000 * gap);
            let told = format!("every {gap} ns, {late} late: {did:?}");
            assert!(
                did.handled >= 9_990 && did.spin_time * 5 < did.elapsed && did.cpu_time * 2 < did.elapsed,
                "{told}"
            );
            // Where precise sleeps cost as much as they save, it sleeps.
            let sleeps = late + WORK_NANOS < gap / 2;
            if sleeps { assert!(did.polled > 9_800, "{told}") } else { assert!(did.polled < 1_000, "{told}") }
        }
    }
}

/// Bursts of `count` requests, `apart` from each other, one burst per `every`.
fn in_bursts(count: u64, apart: u64, every: u64, bursts: u64) -> impl Iterator<Item = u64> {
    (1..=bursts).flat_map(move |burst| (0..count).map(move |number| burst * every + number * apart))
}

// 20,000 requests per second in several patterns: a lane that always polled would use a whole
// CPU.
#[test]
fn adaptive_waiting_uses_less_than_half_a_core() {
    const LENGTH_NANOS: u64 = 500_000_000;
    for late in WAKE_LATENCIES_NANOS {
        let even = Lane::new(late).run(every(50_000, 9_999), LENGTH_NANOS);
        let chance = Lane::new(late).run(poisson(50e3, 9_999), LENGTH_NANOS);
        let bursts = Lane::new(late).run(in_bursts(8, 4_000, 400_000, 1_249), LENGTH_NANOS);
        assert_eq!((even.handled, bursts.handled), (9_999, 9_992), "{late} late: {even:?} {bursts:?}");
        for (did, kind) in [(even, "even"), (chance, "by chance"), (bursts, "in bursts")] {
            assert!(did.cpu_time * 100 < did.elapsed * 45, "{kind}, {late} late: {did:?}");
            assert!(
                did.sleeps <= did.handled as u64 + LENGTH_NANOS / IDLE_SLEEP_NANOS_MAX,
                "{kind}, {late} late: {did:?}"
            );
        }
    }
}

// A ping-pong: the next request arrives after the reply to the last one. A client that stalls now
// and then does not wait for a wake-up as well.
#[test]
fn a_short_irregularity_is_spun_through() {
    let requests: Vec<u64> = (1..=10_000).map(|number| number * 13_000 + number / 80 * 40_000).collect();
    for late in &WAKE_LATENCIES_NANOS[..2] {
        let did = Lane::new(*late).run(requests.clone(), requests[9_999]);
        // At first it has to learn gaps and to save up overtime; after that it never sleeps.
        assert_eq!(did.handled, 10_000, "{late} late: {did:?}");
        assert!(did.sleeps <= 16 && did.polled >= 9_960, "{late} late: {did:?}");
    }
}

#[test]
fn two_long_gaps_cost_one_sleep_each() {
    // Two in a row, every 400 requests; the first before any overtime was saved up.
    let stumbles = |number: u64| (number + 390) / 400 + (number + 387) / 400;
    let requests: Vec<u64> =
        (1..=10_000).map(|number| number * 13_000 + stumbles(number) * 500_000).collect();
    for late in &WAKE_LATENCIES_NANOS[..2] {
        let did = Lane::new(*late).run(requests.clone(), requests[9_999]);
        assert_eq!(did.handled, 10_000, "{late} late: {did:?}");
        assert!(did.sleeps <= 50 + 16, "{late} late: {did:?}");
    }
}

#[test]
fn a_recovered_wake_latency_restores_sleeping() {
    let mut lane = Lane::new(28_000);
    let slow = lane.run(every(50_000, 10_000), 500_000_000);
    lane.wake_latency = 4_000;
    // It takes a while to adapt, because it has no precise sleeps to learn from.
    lane.run(every(50_000, 5_000), 250_000_000);
    let quick = lane.run(every(50_000, 10_000), 500_000_000);
    assert!(slow.polled < 1_000 && quick.polled > 9_800, "{slow:?} {quick:?}");
    assert!(slow.cpu_time * 2 < slow.elapsed && quick.cpu_time * 2 < quick.elapsed, "{slow:?} {quick:?}");
}

#[test]
fn unpredictable_arrivals_are_slept_for() {
    for late in WAKE_LATENCIES_NANOS {
        for mean in [100e3, 1e6] {
            let requests = poisson(mean, 10_000);
            let end = *requests.last().unwrap();
            let did = Lane::new(late).run(requests, end);
            assert!(did.spin_time * 20 < did.elapsed, "{mean} ns, {late} late: {did:?}");
        }
        // Close together, polling pays all the same.
        let requests = poisson(8e3, 10_000);
        let end = *requests.last().unwrap();
        let did = Lane::new(late).run(requests, end);
        assert!(did.sleeps < 1_500, "{late} late: {did:?}");
    }
}

#[test]
fn a_changed_interval_is_learnt() {
    for late in &WAKE_LATENCIES_NANOS[..2] {
        let mut lane = Lane::new(*late);
        let before = lane.run(every(10_000, 1_000), 10_000_000);
        let after = lane.run(every(50_000, 1_000), 50_000_000);
        let again = lane.run(every(10_000, 1_000), 10_000_000);
        assert!(before.polled > 750 && again.polled > 900, "{late} late: {before:?} {again:?}");
        assert!(after.spin_time * 3 < after.elapsed && after.polled > 900, "{late} late: {after:?}");
    }
}

#[test]
fn a_missed_request_does_not_delay_later_ones() {
    // Every thousandth request arrives unpredictably early.
    let requests =
        (1..=10_000_u64).map(|number| number * 50_000 - if number % 1_000 == 0 { 25_000 } else { 0 });
    for late in &WAKE_LATENCIES_NANOS[..2] {
        let did = Lane::new(*late).run(requests.clone(), 500_000_000);
        assert!(did.polled > 9_700, "{late} late: {did:?}");
    }
}

#[test]
fn fixed_wait_policies_are_followed() {
    let micros = Duration::from_micros;
    let mut spin = WaitGovernor::new(WaitPolicy::Spin(micros(70)));
    for now in [0, 10, 100_000] {
        assert!(spin.can_spin() && !spin.is_adaptive());
        assert_eq!(spin.plan(micros(now)), Plan { sleep_until: Duration::ZERO, spin_until: micros(70) });
        spin.record_arrival(micros(now), Arrival::Woken);
        spin.record_timeout();
    }
    for policy in [WaitPolicy::Sleep, WaitPolicy::BusyPoll(micros(50))] {
        assert!(!WaitGovernor::new(policy).can_spin());
    }
}

proptest! {
    /// For any arrivals: every request is handled, and polling per batch has a bound.
    #[test]
    fn polling_is_bounded_by_the_arrivals(
        gaps in prop::collection::vec(0_u64..2_000_000, 0..500),
        late in 0_u64..60_000,
    ) {
        let requests: Vec<u64> = gaps.iter().scan(0, |at, gap| { *at += gap; Some(*at) }).collect();
        let end = requests.last().copied().unwrap_or(0) + 5 * IDLE_SLEEP_NANOS_MAX;
        let did = Lane::new(late).run(requests.clone(), end);
        prop_assert_eq!(did.handled, requests.len());
        prop_assert!(did.spin_time <= (SPIN_NANOS_MAX + WAKE_LATENCY_NANOS_MAX) * (requests.len() as u64 + 1), "{:?}", did);
        prop_assert!(did.sleeps <= end / IDLE_SLEEP_NANOS_MAX + 2 * requests.len() as u64 + 2, "{:?}", did);
    }

    /// For any history: making a plan does not fail, and its cost is within what pays.
    #[test]
    fn any_history_makes_a_plan(
        times in prop::collection::vec((any::<u64>(), any::<bool>()), 0..40),
        late in prop::collection::vec(any::<u64>(), 0..20),
        now in any::<u64>(),
    ) {
        let mut pacer = WaitGovernor::new(WaitPolicy::Adaptive);
        late.iter().for_each(|&by| pacer.record_wake_latency(Duration::from_nanos(by)));
        for &(time, awake) in &times {
            pacer.record_arrival(Duration::from_nanos(time), if awake { Arrival::Polled } else { Arrival::Woken });
        }
        let Plan { sleep_until, spin_until } = pacer.plan(Duration::from_nanos(now));
        prop_assert!(sleep_until <= spin_until && spin_until - sleep_until <= Duration::from_nanos(SPIN_NANOS_MAX + WAKE_LATENCY_NANOS_MAX));
    }
}
