//! Controllers, call by call: exact windows, and what must hold whatever they are told.

mod link;

use std::time::Duration;

use manylane_tcp::congestion::{
    Acked, Algorithm, Bbr, Controller, Cubic, NewReno, RateSample, RateSampler, WINDOW_MAX, initial_window,
};
use manylane_tcp::time::Time;
use proptest::prelude::*;

const MSS: u16 = 1000;
/// Long enough for CUBIC's curve to be faster than NewReno.
const RTT: Duration = Duration::from_millis(200);

fn acked(now: Time, bytes: u32) -> Acked {
    Acked { now, bytes, rtt: Some(RTT), ..Acked::default() }
}

/// Grows the window to `segments` in slow start: two with each ACK.
fn slow_start(controller: &mut dyn Controller, segments: u32) {
    while controller.window() < segments * 1000 {
        controller.on_ack(&acked(Time(0), 2000));
    }
    assert_eq!(controller.window(), segments * 1000);
}

/// Acknowledges a window each `RTT` in 200 steps, from `from` to `to` seconds.
fn acknowledge(controller: &mut dyn Controller, from: f64, to: f64) {
    for millisecond in (from * 1e3) as u64..(to * 1e3) as u64 {
        controller.on_ack(&acked(Time(millisecond * 1000), controller.window() / 200));
    }
}

#[test]
fn names_are_read_as_written() {
    for algorithm in Algorithm::ALL {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    let error = "vegas".parse::<Algorithm>().unwrap_err();
    assert_eq!(error.to_string(), "unknown congestion control \"vegas\": expected new-reno, cubic or bbr");
}

#[test]
fn initial_windows_are_those_of_rfc_6928() {
    assert_eq!([536, 1448, 1460, 2000, 9000].map(initial_window), [5360, 14_480, 14_600, 14_600, 18_000]);
}

#[test]
fn slow_start_adds_at_most_two_segments_an_ack() {
    for algorithm in [Algorithm::NewReno, Algorithm::Cubic] {
        let mut controller = algorithm.controller(MSS);
        for (bytes, window) in [(1000, 11_000), (2000, 13_000), (500, 13_500), (9000, 15_500)] {
            controller.on_ack(&acked(Time(0), bytes));
            assert_eq!(controller.window(), window, "{algorithm}");
        }
    }
}

#[test]
fn new_reno_halves_and_grows_by_a_segment_a_window() {
    let mut reno = NewReno::new(MSS);
    slow_start(&mut reno, 40);
    // Two segments beyond the window: those of the first duplicate ACKs do not count.
    reno.on_loss(Time(0), 42_000);
    assert_eq!(reno.window(), 20_000);
    reno.on_ack(&acked(Time(0), 5000));
    assert_eq!(reno.window(), 20_000, "a partial ACK does not grow the window");
    reno.on_recovered(Time(0), 20_000);
    for _ in 0..19 {
        reno.on_ack(&acked(Time(0), 1000));
    }
    assert_eq!(reno.window(), 20_000);
    reno.on_ack(&acked(Time(0), 1000));
    assert_eq!(reno.window(), 21_000);
}

#[test]
fn new_reno_sends_no_burst_after_a_recovery() {
    let mut reno = NewReno::new(MSS);
    slow_start(&mut reno, 40);
    reno.on_loss(Time(0), 40_000);
    reno.on_recovered(Time(0), 3000);
    assert_eq!(reno.window(), 4000);
    reno.on_ack(&acked(Time(0), 2000));
    assert_eq!(reno.window(), 6000, "slow start up to half of the former window");
}

#[test]
fn timeouts_begin_with_one_segment_again() {
    for (algorithm, threshold) in [(Algorithm::NewReno, 20_000), (Algorithm::Cubic, 28_000)] {
        let mut controller = algorithm.controller(MSS);
        slow_start(&mut *controller, 40);
        for _ in 0..2 {
            // The second one is for the same data, and changes nothing.
            controller.on_timeout(Time(0), 40_000);
            assert_eq!(controller.window(), 1000, "{algorithm}");
        }
        for segments in 2..=threshold / 1000 {
            controller.on_ack(&acked(Time(0), 2000));
            assert_eq!(controller.window(), segments * 1000, "{algorithm}: one segment an ACK");
        }
        controller.on_ack(&acked(Time(0), 1000));
        assert!(controller.window() < threshold + 100, "{algorithm}: slow start is over");
    }
}

#[test]
fn windows_restart_after_silence() {
    for algorithm in [Algorithm::NewReno, Algorithm::Cubic] {
        let mut controller = algorithm.controller(MSS);
        slow_start(&mut *controller, 40);
        controller.on_restart(Time(9_000_000));
        assert_eq!(controller.window(), 10_000, "{algorithm}");
    }
}

/// W(t) = 0.4 (t - K)³ + 100 segments, where K is the cube root of (100 - 70) / 0.4, 4.217 s.
#[test]
fn cubic_follows_its_curve() {
    let mut cubic = Cubic::new(MSS);
    slow_start(&mut cubic, 100);
    cubic.on_loss(Time(0), 100_000);
    assert_eq!(cubic.window(), 70_000);
    cubic.on_recovered(Time(0), 70_000);
    let mut from = 0.0;
    for (to, segments) in [(1.0, 86.68), (2.0, 95.64), (4.217, 100.0), (6.0, 102.27), (8.0, 121.65)] {
        acknowledge(&mut cubic, from, to);
        from = to;
        let window = f64::from(cubic.window()) / 1000.0;
        assert!((window / segments - 1.0).abs() < 0.01, "{window} instead of {segments} after {to} s");
    }
}

/// A loss at 70 segments, below the plateau of 100: the next one is at 70 · 0.85 = 59.5. From 49,
/// K is the cube root of 10.5 / 0.4, 2.972 s.
#[test]
fn cubic_yields_when_it_loses_below_its_plateau() {
    let mut cubic = Cubic::new(MSS);
    slow_start(&mut cubic, 100);
    for window in [70_000, 49_000] {
        cubic.on_loss(Time(0), cubic.window());
        assert_eq!(cubic.window(), window);
        cubic.on_recovered(Time(0), window);
        cubic.on_ack(&acked(Time(0), 1));
    }
    acknowledge(&mut cubic, 0.0, 2.972);
    assert!(cubic.window().abs_diff(59_500) < 600, "{}", cubic.window());
}

/// On a short path the curve is slower than NewReno, which from 7 segments grows by 9/17 each round
/// trip up to the 10 before the loss, and by one from there.
#[test]
fn cubic_is_no_slower_than_new_reno() {
    let mut cubic = Cubic::new(MSS);
    cubic.on_loss(Time(0), 10_000);
    cubic.on_recovered(Time(0), 7000);
    for (round, window) in (0..).zip([7529, 8058, 8588, 9117, 9647, 10_176, 11_176, 12_176]) {
        let rtt = Some(Duration::from_millis(1));
        cubic.on_ack(&Acked { rtt, ..acked(Time(round * 1000), cubic.window() + 1) });
        assert!(cubic.window().abs_diff(window) <= 1, "{} instead of {window}", cubic.window());
    }
}

#[test]
fn windows_do_not_grow_without_data_to_send() {
    for algorithm in [Algorithm::NewReno, Algorithm::Cubic] {
        let mut controller = algorithm.controller(MSS);
        for is_avoiding in [false, true] {
            if is_avoiding {
                controller.on_loss(Time(0), 100_000);
                controller.on_recovered(Time(0), 100_000);
                controller.on_ack(&acked(Time(0), 1));
            }
            let window = controller.window();
            for second in 0..60 {
                let now = Time(second * 1_000_000);
                controller.on_ack(&Acked { app_limited: true, ..acked(now, 2000) });
            }
            assert_eq!(controller.window(), window, "{algorithm}");
        }
    }
}

#[test]
fn cubic_does_not_leap_after_silence() {
    let mut cubic = Cubic::new(MSS);
    slow_start(&mut cubic, 100);
    cubic.on_loss(Time(0), 100_000);
    cubic.on_recovered(Time(0), 70_000);
    acknowledge(&mut cubic, 0.0, 4.0);
    let window = cubic.window();
    cubic.on_sent(Time(64_000_000), 1000, 0);
    cubic.on_ack(&acked(Time(64_100_000), 1000));
    assert!(cubic.window() - window < 10, "{} after {window}", cubic.window());
}

/// An ACK of a segment each millisecond, with the same delivery rate: 1 MB/s over 50 ms. More than
/// that is in flight while the controller paces faster.
fn deliver(bbr: &mut Bbr, milliseconds: std::ops::Range<u64>, mut check: impl FnMut(u64, &Bbr)) {
    let rtt = Duration::from_millis(50);
    for millisecond in milliseconds {
        let round_start = millisecond.is_multiple_of(50);
        let rate = RateSample { delivered: 50_000, interval: rtt, app_limited: false, round_start };
        let is_slow = bbr.pacing_rate().is_some_and(|rate| rate <= 1_000_000);
        let in_flight = bbr.window().min(if is_slow { 50_000 } else { 80_000 });
        let now = Time(millisecond * 1000);
        // The first sample is the minimum.
        let rtt = Some(rtt + Duration::from_micros(u64::from(millisecond > 0)));
        bbr.on_ack(&Acked { now, bytes: 1000, rtt, in_flight, app_limited: false, rate: Some(rate) });
        check(millisecond, bbr);
    }
}

#[test]
fn bbr_paces_at_the_delivery_rate_and_probes() {
    let mut bbr = Bbr::new(MSS);
    assert_eq!((bbr.window(), bbr.pacing_rate()), (10_000, None));
    let mut rates = Vec::new();
    deliver(&mut bbr, 0..2000, |millisecond, bbr| {
        let rate = bbr.pacing_rate().unwrap();
        if millisecond < 150 {
            assert_eq!(rate, 2_886_000, "Startup");
        } else if rates.last() != Some(&rate) {
            rates.push(rate);
        }
    });
    assert!(rates.windows(3).any(|rates| rates == [1_000_000, 1_250_000, 750_000]), "{rates:?}");
    // Twice the bandwidth-delay product, and three bursts of two segments.
    assert_eq!(bbr.window(), 106_000);
}

#[test]
fn bbr_measures_the_round_trip_again_after_ten_seconds() {
    let mut bbr = Bbr::new(MSS);
    let mut probing = Vec::new();
    deliver(&mut bbr, 0..12_000, |millisecond, bbr| {
        if bbr.window() == 4000 {
            probing.push(millisecond);
        }
    });
    assert_eq!(probing.first(), Some(&10_001));
    // The first ACK after 200 ms restores the window.
    assert!(matches!(probing.last(), Some(10_201..10_205)), "{:?}", probing.last());
}

#[test]
fn bbr_restores_its_window_after_a_loss() {
    let mut bbr = Bbr::new(MSS);
    deliver(&mut bbr, 0..2000, |_, _| {});
    bbr.on_loss(Time(2_000_000), 60_000);
    assert_eq!(bbr.window(), 57_000, "what is in flight, but for three duplicate ACKs");
    deliver(&mut bbr, 2001..2040, |_, bbr| assert_eq!(bbr.window(), 57_000));
    bbr.on_recovered(Time(2_040_000), 50_000);
    assert_eq!(bbr.window(), 106_000);
    bbr.on_timeout(Time(2_050_000), 50_000);
    assert_eq!(bbr.window(), 4000);
}

/// Sends and acknowledges a segment each millisecond, 40 ms later, from number `first` on.
fn samples(first: u32, mut edge: impl FnMut(u32, &mut RateSampler)) -> Vec<RateSample> {
    let mut sampler = RateSampler::new(first, MSS);
    let mut samples = Vec::new();
    for millisecond in 0..400 {
        let now = Time(u64::from(millisecond) * 1000);
        let number = |segment: u32| first.wrapping_add(segment * 1000);
        if millisecond > 40 {
            samples.extend(sampler.on_ack(now, number(millisecond - 40)));
        }
        edge(millisecond, &mut sampler);
        sampler.on_sent(now, number(millisecond + 1), millisecond.min(40) * 1000);
    }
    samples
}

#[test]
fn delivery_rates_are_exact() {
    for first in [0, u32::MAX - 100_000] {
        let samples = samples(first, |_, _| {});
        assert!(samples.len() > 40);
        // The first round measures how the window was filled.
        assert!(samples[8..].iter().all(|sample| sample.rate() == 1_000_000), "{samples:?}");
        // The second is still marked as densely as the first.
        assert!(samples[14..].iter().all(|sample| sample.interval.as_millis() == 42), "{samples:?}");
        let rounds = samples.iter().filter(|sample| sample.round_start).count();
        assert!((7..=9).contains(&rounds), "{rounds}");
    }
}

#[test]
fn delivery_rates_say_when_data_ran_out() {
    let samples = samples(0, |millisecond, sampler| {
        if millisecond == 200 {
            sampler.on_app_limited(40_000);
        }
    });
    let limited = samples.iter().filter(|sample| sample.app_limited).count();
    assert!((4..=8).contains(&limited), "{limited}: about a round trip's marks");
}

#[test]
fn an_ack_that_fills_gaps_does_not_raise_the_rate() {
    let mut sampler = RateSampler::new(0, MSS);
    for segment in 0..100 {
        sampler.on_sent(Time(u64::from(segment) * 1000), (segment + 1) * 1000, segment * 1000);
    }
    // Segments 0 and 1 are missing, and each is sent again a round trip after the other.
    (0..98).for_each(|_| sampler.on_out_of_order(1000));
    let first = sampler.on_ack(Time(200_000), 1000);
    assert_eq!(first.map(|sample| sample.delivered), Some(99_000));
    let second = sampler.on_ack(Time(300_000), 100_000).unwrap();
    assert_eq!((second.delivered, second.interval), (100_000, Duration::from_millis(300)));
}

fn hostile() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), Just(u32::MAX), 0..100_000u32, any::<u32>()]
}

fn hostile_time() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), 0..100_000_000u64, any::<u64>()]
}

type Call = (u8, u64, u32, u32, u64, bool, bool);

fn call() -> impl Strategy<Value = Call> {
    (0..9u8, hostile_time(), hostile(), hostile(), hostile_time(), any::<bool>(), any::<bool>())
}

fn apply(controller: &mut dyn Controller, mss: &mut u16, call: Call) {
    let (kind, now, bytes, in_flight, micros, app_limited, is_known) = call;
    let now = Time(now);
    match kind {
        0 => controller.on_sent(now, bytes, in_flight),
        1 => controller.on_loss(now, in_flight),
        2 => controller.on_recovered(now, in_flight),
        3 => controller.on_timeout(now, in_flight),
        4 => controller.on_restart(now),
        5 => {
            *mss = bytes as u16;
            controller.set_mss(*mss);
        }
        _ => {
            let time = Duration::from_micros(micros);
            let rate =
                RateSample { delivered: in_flight, interval: time, app_limited, round_start: kind == 6 };
            let (rtt, rate) = (is_known.then_some(time), Some(rate));
            controller.on_ack(&Acked { now, bytes, rtt, in_flight, app_limited, rate });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn windows_stay_within_their_bounds(first: u16, calls in prop::collection::vec(call(), 0..100)) {
        for (algorithm, segments) in Algorithm::ALL.into_iter().zip([1, 1, 4]) {
            let mut mss = first;
            let mut controller = algorithm.controller(mss);
            for call in &calls {
                apply(&mut *controller, &mut mss, *call);
                let window = controller.window();
                let least = segments * u32::from(mss.max(1));
                prop_assert!((least..=WINDOW_MAX).contains(&window), "{algorithm}: {window} after {call:?}");
                prop_assert!(controller.pacing_rate().is_none_or(|rate| rate > 0), "{algorithm}: {call:?}");
            }
        }
    }

    #[test]
    fn samplers_take_any_numbers(first: u32, calls in prop::collection::vec(call(), 0..100)) {
        let mut sampler = RateSampler::new(first, MSS);
        for (kind, now, number, in_flight, ..) in calls {
            match kind {
                0..4 => sampler.on_sent(Time(now), first.wrapping_add(number), in_flight),
                4 => sampler.on_app_limited(in_flight),
                5 => sampler.on_out_of_order(in_flight),
                _ => {
                    let sample = sampler.on_ack(Time(now), first.wrapping_add(number));
                    prop_assert!(sample.is_none_or(|sample| sample.rate() <= u64::from(u32::MAX) * 1_000_000));
                }
            }
        }
    }
}
