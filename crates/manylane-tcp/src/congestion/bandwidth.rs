//! BBR's estimate of the bandwidth of the path
//! (draft-cardwell-iccrg-bbr-congestion-control-00, sections 4.1.1 and 4.3.2.2).

use super::rate::RateSample;

/// Rounds for which a delivery rate is remembered.
const ROUNDS: usize = 10;
/// Bounds rates, so that products with gains do not overflow: 8 Tbit/s.
pub(super) const RATE_MAX: u64 = 1 << 40;
/// Rounds without growth that show that the path is full.
const FULL_ROUNDS: u8 = 3;

/// The maximum delivery rate of the last ten rounds. Rounds in which the application had too little
/// to send do not count as rounds unless they raise the maximum.
#[derive(Clone, Debug, Default)]
pub(super) struct Bandwidth {
    /// `rates[newest]` is the maximum of the current round.
    rates: [u64; ROUNDS],
    newest: u8,
    round_ended: bool,
    /// Rounds without growth, and the rate at the last growth.
    full_rounds: u8,
    full_rate: u64,
    /// In bytes per second; zero before the first sample.
    max: u64,
}

impl Bandwidth {
    /// In bytes per second; zero before the first sample.
    pub(super) fn max(&self) -> u64 {
        self.max
    }

    /// True once the rate has grown by less than a quarter in each of three rounds.
    pub(super) fn is_full(&self) -> bool {
        self.full_rounds >= FULL_ROUNDS
    }

    /// Takes a sample. `is_limited`: something other than the path limited the rate.
    pub(super) fn update(&mut self, sample: &RateSample, is_limited: bool) {
        self.round_ended |= sample.round_start;
        let rate = sample.rate().min(RATE_MAX);
        if is_limited && rate < self.max {
            return;
        }
        let ended = std::mem::take(&mut self.round_ended);
        if ended {
            self.newest = (self.newest + 1) % ROUNDS as u8;
            self.rates[usize::from(self.newest)] = 0;
        }
        let newest = &mut self.rates[usize::from(self.newest)];
        *newest = rate.max(*newest);
        self.max = self.rates.into_iter().max().unwrap_or(rate);
        if ended && !is_limited && !self.is_full() {
            let has_grown = self.max >= self.full_rate + self.full_rate / 4;
            (self.full_rate, self.full_rounds) =
                if has_grown { (self.max, 0) } else { (self.full_rate, self.full_rounds + 1) };
        }
    }
}
