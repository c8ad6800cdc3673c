//! Bulk transfers over a simulated bottleneck, and what each controller makes of it.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use manylane_tcp::congestion::{Acked, Algorithm, Controller, RateSampler};
use manylane_tcp::time::Time;

const MSS: u16 = 1448;
const SEGMENT: u32 = MSS as u32;
const FRAME: u64 = 1500;
/// 10 Mbit/s, in bytes per second.
const RATE: u64 = 1_250_000;
const ONE_WAY: Duration = Duration::from_millis(20);
/// Bandwidth-delay product.
const BDP: u64 = 50_000;
const NEVER: Time = Time(u64::MAX);
const RTO_MIN: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Data { flow: usize, sequence: u32, sent: Time },
    Ack { flow: usize, acked_to: u32, sent: Time },
    Wake { flow: usize },
}

/// A queue that drops what exceeds its buffer, and loses `loss` of a million frames at random.
struct Link {
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    number: u64,
    free_at: Time,
    buffer: u64,
    loss: u64,
    random: u64,
}

impl Link {
    fn push(&mut self, at: Time, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, event)));
    }

    fn send(&mut self, now: Time, event: Event) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let queued = self.free_at.since(now).as_micros() as u64 * RATE / 1_000_000;
        if self.random % 1_000_000 < self.loss || queued + FRAME > self.buffer {
            return;
        }
        self.free_at = self.free_at.max(now) + Duration::from_micros(FRAME * 1_000_000 / RATE);
        self.push(self.free_at + ONE_WAY, event);
    }
}

/// A sender with data at all times, recovery by RFC 6582, and its receiver.
struct Flow {
    id: usize,
    controller: Box<dyn Controller>,
    sampler: RateSampler,
    acked_to: u32,
    next: u32,
    end: u32,
    duplicates: u32,
    inflation: u32,
    recover: Option<u32>,
    /// No fast retransmission below, after a timeout.
    recovered_to: u32,
    paced_to: Time,
    rtt: Option<(Duration, Duration)>,
    backoff: u32,
    timeout_at: Time,
    wake_at: Time,
    expected: u32,
    out_of_order: BTreeSet<u32>,
}

impl Flow {
    fn new(id: usize, algorithm: Algorithm) -> Flow {
        Flow {
            id,
            controller: algorithm.controller(MSS),
            sampler: RateSampler::new(0, MSS),
            acked_to: 0,
            next: 0,
            end: 0,
            duplicates: 0,
            inflation: 0,
            recover: None,
            recovered_to: 0,
            paced_to: Time(0),
            rtt: None,
            backoff: 0,
            timeout_at: NEVER,
            wake_at: NEVER,
            expected: 0,
            out_of_order: BTreeSet::new(),
        }
    }

    fn received(&self) -> u32 {
        self.expected + self.out_of_order.len() as u32 * SEGMENT
    }

    fn transmit(&mut self, now: Time, sequence: u32, link: &mut Link) {
        let in_flight = self.end - self.acked_to;
        self.controller.on_sent(now, SEGMENT, in_flight);
        self.sampler.on_sent(now, sequence + SEGMENT, in_flight);
        if let Some(rate) = self.controller.pacing_rate() {
            self.paced_to =
                self.paced_to.max(now) + Duration::from_micros(u64::from(SEGMENT) * 1_000_000 / rate);
        }
        if self.timeout_at == NEVER {
            self.restart_timer(now);
        }
        link.send(now, Event::Data { flow: self.id, sequence, sent: now });
    }

    fn restart_timer(&mut self, now: Time) {
        let timeout = self.rtt.map_or(Duration::from_secs(1), |(rtt, variance)| rtt + 4 * variance);
        self.timeout_at = now + timeout.max(RTO_MIN) * (1 << self.backoff.min(6));
    }

    fn wake(&mut self, now: Time, link: &mut Link) {
        if now >= self.timeout_at {
            self.controller.on_timeout(now, self.end - self.acked_to);
            self.recovered_to = self.end;
            self.next = self.acked_to;
            (self.duplicates, self.inflation, self.recover) = (0, 0, None);
            self.backoff += 1;
            self.restart_timer(now);
        }
        let mut next_wake = NEVER;
        while self.next + SEGMENT - self.acked_to <= self.controller.window() + self.inflation {
            if self.controller.pacing_rate().is_some() && now < self.paced_to {
                next_wake = next_wake.min(self.paced_to);
                break;
            }
            self.transmit(now, self.next, link);
            self.next += SEGMENT;
            self.end = self.end.max(self.next);
        }
        next_wake = next_wake.min(self.timeout_at);
        if self.wake_at <= now || next_wake < self.wake_at {
            self.wake_at = next_wake;
            link.push(next_wake, Event::Wake { flow: self.id });
        }
    }

    fn on_data(&mut self, now: Time, sequence: u32, sent: Time, link: &mut Link) {
        if sequence >= self.expected {
            self.out_of_order.insert(sequence);
        }
        while self.out_of_order.remove(&self.expected) {
            self.expected += SEGMENT;
        }
        link.push(now + ONE_WAY, Event::Ack { flow: self.id, acked_to: self.expected, sent });
    }

    fn on_ack(&mut self, now: Time, acked_to: u32, sent: Time, link: &mut Link) {
        if acked_to <= self.acked_to {
            self.duplicates += 1;
            self.inflation += SEGMENT;
            self.sampler.on_out_of_order(SEGMENT);
            if self.duplicates == 3 && self.recover.is_none() && acked_to >= self.recovered_to {
                self.controller.on_loss(now, self.end - self.acked_to);
                self.recover = Some(self.end);
                self.transmit(now, self.acked_to, link);
            }
            return self.wake(now, link);
        }
        let (bytes, sample) = (acked_to - self.acked_to, now.since(sent));
        self.rtt = Some(self.rtt.map_or((sample, sample / 2), |(rtt, variance)| {
            ((rtt * 7 + sample) / 8, (variance * 3 + rtt.abs_diff(sample)) / 4)
        }));
        (self.acked_to, self.next) = (acked_to, self.next.max(acked_to));
        (self.duplicates, self.backoff) = (0, 0);
        let in_flight = self.end - acked_to;
        let rate = self.sampler.on_ack(now, acked_to);
        self.controller.on_ack(&Acked { now, bytes, rtt: Some(sample), in_flight, app_limited: false, rate });
        if self.recover.is_some_and(|end| acked_to < end) {
            self.inflation = self.inflation.saturating_sub(bytes) + SEGMENT;
            self.transmit(now, acked_to, link);
        } else {
            self.inflation = 0;
            if self.recover.take().is_some() {
                self.controller.on_recovered(now, in_flight);
            }
        }
        self.restart_timer(now);
        self.wake(now, link);
    }
}

/// Bytes that each flow delivers from `from` to `to`; they start a second apart.
fn transfer(algorithms: &[Algorithm], buffer: u64, loss: u64, from: u64, to: u64) -> Vec<u32> {
    let mut link =
        Link { events: BinaryHeap::new(), number: 0, free_at: Time(0), buffer, loss, random: 0x5eed };
    let mut flows: Vec<Flow> =
        algorithms.iter().enumerate().map(|(id, algorithm)| Flow::new(id, *algorithm)).collect();
    for flow in 0..flows.len() {
        link.push(Time(flow as u64 * 1_000_000), Event::Wake { flow });
    }
    let mut before = Vec::new();
    while let Some(Reverse((now, _, event))) = link.events.pop() {
        if before.is_empty() && now.0 >= from * 1_000_000 {
            before = flows.iter().map(Flow::received).collect();
        }
        if now.0 >= to * 1_000_000 {
            break;
        }
        match event {
            Event::Data { flow, sequence, sent } => flows[flow].on_data(now, sequence, sent, &mut link),
            Event::Ack { flow, acked_to, sent } => flows[flow].on_ack(now, acked_to, sent, &mut link),
            Event::Wake { flow } => flows[flow].wake(now, &mut link),
        }
    }
    flows.iter().zip(before).map(|(flow, before)| flow.received() - before).collect()
}

/// Share of the capacity that one flow uses in 30 s from its start.
fn utilization(algorithm: Algorithm, loss: u64) -> f64 {
    let bytes = transfer(&[algorithm], BDP, loss, 0, 30)[0];
    let share = f64::from(bytes) / (30.0 * RATE as f64 * f64::from(MSS) / FRAME as f64);
    println!("{algorithm}: {share:.3} of the capacity with {loss} of 1,000,000 frames lost");
    share
}

#[test]
fn each_fills_a_link_without_random_loss() {
    for algorithm in Algorithm::ALL {
        assert!(utilization(algorithm, 0) >= 0.9, "{algorithm}");
    }
}

#[test]
fn only_bbr_fills_a_link_that_loses_at_random() {
    let [new_reno, cubic, bbr] = Algorithm::ALL.map(|algorithm| utilization(algorithm, 10_000));
    assert!(bbr >= 0.8);
    assert!(new_reno < 0.6 && cubic < 0.6);
}

#[test]
fn two_flows_share_a_link() {
    for (algorithm, buffer) in
        Algorithm::ALL.into_iter().flat_map(|algorithm| [(algorithm, 1), (algorithm, 3)])
    {
        let bytes = transfer(&[algorithm; 2], buffer * BDP, 0, 10, 70).into_iter().map(f64::from);
        let (sum, squares) = bytes.clone().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
        let jain = sum * sum / (2.0 * squares);
        let share = sum / (60.0 * RATE as f64 * f64::from(MSS) / FRAME as f64);
        println!("{algorithm}, buffer of {buffer} BDP: Jain index {jain:.3}, {share:.3} of the capacity");
        assert!(jain >= 0.9, "{algorithm}: {jain}");
        // Each flow of BBR keeps up to two bandwidth-delay products of its share in flight and does
        // not yield to losses: together they overflow a buffer of one.
        let least = if algorithm == Algorithm::Bbr && buffer == 1 { 0.7 } else { 0.9 };
        assert!(share >= least, "{algorithm}: {share}");
    }
}
