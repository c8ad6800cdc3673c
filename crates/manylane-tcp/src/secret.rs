//! What a peer must not be able to predict: the place of a flow in the table, initial sequence
//! numbers, and SYN cookies. All are hashes with a key (SipHash-1-3).

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use crate::flow::Flow;
use crate::time::Time;

/// For how long a cookie is valid at least; at most twice as long.
const COOKIE_PERIOD_US: u64 = 60_000_000;
/// The MSS values that a cookie can hold. The largest one is taken that is not above the peer's.
const COOKIE_MSS: [u16; 8] = [88, 536, 1024, 1220, 1360, 1440, 1460, 8960];
/// The shift that stands for "no window scaling".
const COOKIE_NO_SHIFT: u8 = 15;

/// The key of these hashes: random bytes, which the caller gets from the system. All lanes of a
/// process may have the same one.
#[derive(Clone, Copy)]
pub struct Secret {
    key: [u64; 2],
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret")
    }
}

/// What a cookie remembers of a SYN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CookieOptions {
    pub(crate) mss: u16,
    pub(crate) shift: Option<u8>,
    pub(crate) sack: bool,
}

impl Secret {
    /// A secret of random bytes.
    #[must_use]
    pub fn new(random: [u8; 16]) -> Secret {
        let random = u128::from_ne_bytes(random);
        Secret { key: [low(random), low(random >> 64)] }
    }

    /// A seed for numbers that need not be secret.
    pub(crate) fn seed(&self) -> u64 {
        self.key[0] ^ self.key[1]
    }

    /// Hash of a flow, for tables.
    #[inline]
    pub(crate) fn hash(&self, flow: &Flow) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.key[0], self.key[1]);
        hasher.write(&flow.bytes());
        hasher.finish()
    }

    /// The initial sequence number of a connection (RFC 6528): it grows by one each 4 µs, from a
    /// start that differs for each flow.
    pub(crate) fn initial_sequence(&self, flow: &Flow, now: Time) -> u32 {
        low32(self.keyed(flow, 1, 0)).wrapping_add(low32(now.0 / 4))
    }

    /// The initial sequence number of a connection for which nothing is stored. In it are the MSS,
    /// the shift and SACK (eight bits), and a hash (24 bits) of these, the flow, the peer's initial
    /// number and the time.
    pub(crate) fn cookie(&self, flow: &Flow, peer: u32, options: &CookieOptions, now: Time) -> u32 {
        let mss = COOKIE_MSS.iter().rposition(|mss| *mss <= options.mss).unwrap_or(0);
        let shift = options.shift.map_or(COOKIE_NO_SHIFT, |shift| shift.min(COOKIE_NO_SHIFT - 1));
        let stored = low32(mss as u64) << 5 | u32::from(shift) << 1 | u32::from(options.sack);
        self.cookie_hash(flow, peer, stored, now.0 / COOKIE_PERIOD_US) | stored
    }

    /// What `cookie` remembers, if it is one of ours for this flow and not too old.
    pub(crate) fn open_cookie(
        &self,
        flow: &Flow,
        peer: u32,
        cookie: u32,
        now: Time,
    ) -> Option<CookieOptions> {
        let (stored, period) = (cookie & 0xff, now.0 / COOKIE_PERIOD_US);
        [Some(period), period.checked_sub(1)]
            .into_iter()
            .flatten()
            .any(|period| self.cookie_hash(flow, peer, stored, period) == cookie & !0xff)
            .then(|| {
                let shift = (cookie >> 1 & 0xf) as u8;
                CookieOptions {
                    mss: COOKIE_MSS[(cookie >> 5 & 7) as usize],
                    shift: (shift != COOKIE_NO_SHIFT).then_some(shift),
                    sack: cookie & 1 != 0,
                }
            })
    }

    fn cookie_hash(&self, flow: &Flow, peer: u32, stored: u32, period: u64) -> u32 {
        low32(self.keyed(flow, 2, period << 40 | u64::from(stored) << 32 | u64::from(peer))) & !0xff
    }

    /// A hash for one purpose.
    fn keyed(&self, flow: &Flow, purpose: u8, value: u64) -> u64 {
        let mut hasher = SipHasher13::new_with_keys(self.key[0], self.key[1]);
        hasher.write(&flow.bytes());
        hasher.write_u8(purpose);
        hasher.write_u64(value);
        hasher.finish()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low(value: u128) -> u64 {
    value as u64
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low32(value: u64) -> u32 {
    value as u32
}
