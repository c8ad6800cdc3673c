//! The result of a receive, besides the batch itself.

/// Totals of one receive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvSummary {
    pub(crate) messages: usize,
    pub(crate) datagrams: usize,
    pub(crate) bytes: usize,
    pub(crate) truncated: usize,
    pub(crate) gro_messages: usize,
}
