//! Datagrams to drop when a queue is full: new arrivals, or those queued.

use crate::text_form::text_form;

/// The end of a full queue at which datagrams are dropped (tail drop or head drop, as in queueing
/// disciplines).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DropPolicy {
    /// New arrivals, while the queue is full. Queued datagrams are delivered in order, whatever
    /// their age.
    #[default]
    Tail,
    /// Queued datagrams, once they fill more than half of the queue. All but the newest are
    /// dropped unread, and counted in
    /// [`LaneCounters::dropped_stale`](crate::LaneCounters::dropped_stale). A lane checks its
    /// queue after each full batch. For kernel sockets that is one more system call. Before Linux
    /// 4.12, which lacks `SO_MEMINFO`, they are never found to be full.
    Head,
}

text_form!("drop policy", DropPolicy: Tail = "tail", Head = "head");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn policies_parse_as_they_are_displayed() {
        assert_eq!(DropPolicy::default(), DropPolicy::Tail);
        for policy in [DropPolicy::Tail, DropPolicy::Head] {
            assert_eq!(policy.to_string().parse::<DropPolicy>().unwrap(), policy);
        }
        assert_eq!("head".parse::<DropPolicy>().unwrap(), DropPolicy::Head);
        for text in ["", "Head", "head ", "newest"] {
            let err = text.parse::<DropPolicy>().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Config);
            assert!(err.to_string().contains("tail, head"), "{err}");
        }
    }
}
