//! Matches replies with requests and counts the outcomes, without clock or sockets.
//!
//! Times are nanoseconds since the start of the run. The latency of a request counts from the
//! moment when it was *due*, not from when it was sent. A server that stalls the client also
//! delays later requests, and latencies from the time of sending would hide that (coordinated
//! omission).

use std::collections::VecDeque;

use serde::Serialize;

/// Outcomes of all requests. `asked = answered + late + wrong + lost`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RequestCounts {
    /// Requests that were sent.
    pub asked: u64,
    /// Requests with a correct reply in time.
    pub answered: u64,
    /// Requests with a correct reply after the timeout.
    pub late: u64,
    /// Requests with a reply of unexpected bytes.
    pub wrong: u64,
    /// Requests without any reply.
    pub lost: u64,
    /// Further replies to a request that had one.
    pub duplicates: u64,
    /// Datagrams that are not a reply to any request.
    pub unexpected: u64,
}

/// Classification of one datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyStatus {
    /// A correct reply in time, this many nanoseconds after the request was due.
    OnTime(u64),
    /// A correct reply after the timeout.
    Late,
    /// A reply of the wrong bytes.
    Wrong,
    /// A further reply.
    Duplicate,
    /// Not a reply to any request.
    Unexpected,
}

/// The tracker for replies that carry the number of their request.
#[derive(Debug)]
pub struct SeqTracker {
    timeout_ns: u64,
    counts: RequestCounts,
    /// Due times of the requests that may still be answered in time; the first has number `base`.
    due: VecDeque<u64>,
    base: u64,
    /// A bit for each request, set when it has a reply. It is kept for all requests, so that a
    /// duplicate is recognized however late it is.
    answered: Vec<u64>,
}

impl SeqTracker {
    /// An empty tracker. Replies later than `timeout_ns` after the request was due are late.
    pub fn new(timeout_ns: u64) -> Self {
        Self {
            timeout_ns,
            counts: RequestCounts::default(),
            due: VecDeque::new(),
            base: 0,
            answered: Vec::new(),
        }
    }

    /// Records the next request and returns its number.
    pub fn record_request(&mut self, due_ns: u64) -> u64 {
        let number = self.counts.asked;
        self.counts.asked += 1;
        self.due.push_back(due_ns);
        if number.is_multiple_of(64) {
            self.answered.push(0);
        }
        number
    }

    /// Records a reply to request `number`; `right` says whether its bytes are correct.
    pub fn record_reply(&mut self, number: u64, right: bool, now_ns: u64) -> ReplyStatus {
        let verdict = self.classify(number, right, now_ns);
        record(&mut self.counts, verdict);
        verdict
    }

    /// Records a datagram without a number of this run.
    pub fn record_unexpected(&mut self) {
        self.counts.unexpected += 1;
    }

    /// Drops the due times of requests that have timed out. Returns true if no request is left to
    /// wait for.
    pub fn expire(&mut self, now_ns: u64) -> bool {
        while let Some(due) = self.due.front() {
            if now_ns.saturating_sub(*due) <= self.timeout_ns && !self.is_answered(self.base) {
                break;
            }
            self.due.pop_front();
            self.base += 1;
        }
        self.due.is_empty()
    }

    /// Outcomes of the requests up to now; those without a reply count as lost.
    pub fn counts(&self) -> RequestCounts {
        with_lost(self.counts)
    }

    fn classify(&mut self, number: u64, right: bool, now_ns: u64) -> ReplyStatus {
        if number >= self.counts.asked {
            return ReplyStatus::Unexpected;
        }
        if self.is_answered(number) {
            return ReplyStatus::Duplicate;
        }
        self.answered[(number / 64) as usize] |= 1 << (number % 64);
        if !right {
            return ReplyStatus::Wrong;
        }
        // Before `base`: it had timed out when it was dropped.
        let due = number.checked_sub(self.base).and_then(|at| self.due.get(at as usize));
        match due.map(|due| now_ns.saturating_sub(*due)) {
            Some(latency) if latency <= self.timeout_ns => ReplyStatus::OnTime(latency),
            _ => ReplyStatus::Late,
        }
    }

    fn is_answered(&self, number: u64) -> bool {
        self.answered[(number / 64) as usize] >> (number % 64) & 1 == 1
    }
}

/// The tracker for replies without a number: within a flow, the first reply belongs to the first
/// request.
///
/// That has a limit: when a reply is lost, later ones are matched with the request before theirs
/// until the lost one has timed out. Duplicates show as unexpected.
#[derive(Debug)]
pub struct FifoTracker {
    timeout_ns: u64,
    counts: RequestCounts,
    flows: Vec<VecDeque<u64>>,
    /// Pending requests of all flows.
    outstanding: usize,
}

impl FifoTracker {
    /// Number of timeouts for which a request is kept for a late reply.
    const EXPIRY_TIMEOUTS: u64 = 2;

    /// An empty tracker of `flows` flows.
    pub fn new(flows: usize, timeout_ns: u64) -> Self {
        Self {
            timeout_ns,
            counts: RequestCounts::default(),
            flows: vec![VecDeque::new(); flows],
            outstanding: 0,
        }
    }

    /// Records the next request of `flow`.
    pub fn record_request(&mut self, flow: usize, due_ns: u64) {
        self.counts.asked += 1;
        self.flows[flow].push_back(due_ns);
        self.outstanding += 1;
    }

    /// Records a reply on `flow`; `right` says whether its bytes are the expected ones.
    pub fn record_reply(&mut self, flow: usize, right: bool, now_ns: u64) -> ReplyStatus {
        self.expire_flow(flow, now_ns);
        let verdict = match self.flows[flow].pop_front() {
            None => ReplyStatus::Unexpected,
            Some(due) => {
                self.outstanding -= 1;
                let latency = now_ns.saturating_sub(due);
                match (right, latency <= self.timeout_ns) {
                    (false, _) => ReplyStatus::Wrong,
                    (true, true) => ReplyStatus::OnTime(latency),
                    (true, false) => ReplyStatus::Late,
                }
            }
        };
        record(&mut self.counts, verdict);
        verdict
    }

    /// Drops requests that have timed out for good. Returns true if no request is left to wait
    /// for.
    pub fn expire(&mut self, now_ns: u64) -> bool {
        for flow in 0..self.flows.len() {
            self.expire_flow(flow, now_ns);
        }
        self.outstanding == 0
    }

    /// Outcomes of the requests up to now; those without a reply count as lost.
    pub fn counts(&self) -> RequestCounts {
        with_lost(self.counts)
    }

    fn expire_flow(&mut self, flow: usize, now_ns: u64) {
        let queue = &mut self.flows[flow];
        while queue
            .front()
            .is_some_and(|due| now_ns.saturating_sub(*due) > self.timeout_ns * Self::EXPIRY_TIMEOUTS)
        {
            queue.pop_front();
            self.outstanding -= 1;
        }
    }
}

fn record(tally: &mut RequestCounts, verdict: ReplyStatus) {
    match verdict {
        ReplyStatus::OnTime(_) => tally.answered += 1,
        ReplyStatus::Late => tally.late += 1,
        ReplyStatus::Wrong => tally.wrong += 1,
        ReplyStatus::Duplicate => tally.duplicates += 1,
        ReplyStatus::Unexpected => tally.unexpected += 1,
    }
}

fn with_lost(mut tally: RequestCounts) -> RequestCounts {
    tally.lost = tally.asked - tally.answered - tally.late - tally.wrong;
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_accounts_close() {
        let mut ledger = SeqTracker::new(100);
        for due in [0, 10, 20, 30, 40, 50] {
            ledger.record_request(due);
        }
        // Out of order, counted from when it was due.
        assert_eq!(ledger.record_reply(1, true, 25), ReplyStatus::OnTime(15));
        assert_eq!(ledger.record_reply(0, true, 26), ReplyStatus::OnTime(26));
        assert_eq!(ledger.record_reply(0, true, 27), ReplyStatus::Duplicate);
        assert_eq!(ledger.record_reply(6, true, 28), ReplyStatus::Unexpected);
        assert_eq!(ledger.record_reply(2, false, 29), ReplyStatus::Wrong);
        assert!(!ledger.expire(130));
        assert_eq!(ledger.record_reply(3, true, 131), ReplyStatus::Late);
        assert!(ledger.expire(151));
        assert_eq!(ledger.record_reply(4, true, 500), ReplyStatus::Late);
        assert_eq!(ledger.record_reply(4, true, 501), ReplyStatus::Duplicate);
        ledger.record_unexpected();
        let tally = ledger.counts();
        let expected =
            RequestCounts { asked: 6, answered: 2, late: 2, wrong: 1, lost: 1, duplicates: 2, unexpected: 2 };
        assert_eq!(tally, expected);
    }

    #[test]
    fn settled_numbers_are_forgotten() {
        let mut ledger = SeqTracker::new(1000);
        for number in 0..1000 {
            assert_eq!(ledger.record_request(number), number);
            assert_eq!(ledger.record_reply(number, true, number + 3), ReplyStatus::OnTime(3));
            assert!(ledger.expire(number + 3));
            assert!(ledger.due.is_empty());
        }
        assert_eq!(ledger.counts().answered, 1000);
    }

    #[test]
    fn ordered_accounts_close_for_each_flow() {
        let mut ledger = FifoTracker::new(2, 100);
        ledger.record_request(0, 0);
        ledger.record_request(0, 10);
        ledger.record_request(1, 10);
        assert_eq!(ledger.record_reply(0, true, 50), ReplyStatus::OnTime(50));
        assert_eq!(ledger.record_reply(0, true, 50), ReplyStatus::OnTime(40));
        assert_eq!(ledger.record_reply(0, true, 51), ReplyStatus::Unexpected);
        assert_eq!(ledger.record_reply(1, true, 150), ReplyStatus::Late);
        ledger.record_request(1, 200);
        ledger.record_request(1, 210);
        assert_eq!(ledger.record_reply(1, false, 220), ReplyStatus::Wrong);
        assert!(!ledger.expire(300));
        assert!(ledger.expire(1000));
        let tally = ledger.counts();
        assert_eq!((tally.asked, tally.answered, tally.late, tally.wrong), (5, 2, 1, 1));
        assert_eq!((tally.lost, tally.unexpected), (1, 1));
    }
}
