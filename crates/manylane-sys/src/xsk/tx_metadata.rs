//! TX metadata: requests to the kernel about a packet to be sent.

/// The metadata of a packet, in the bytes before it: `struct xsk_tx_metadata` of linux/if_xdp.h,
/// as of Linux 6.14. Requests the checksum: the sum over all bytes from `start` on, to be written
/// at `offset` after that, where the sum of the pseudo header is.
#[repr(C)]
pub(super) struct Metadata {
    pub(super) flags: u64,
    pub(super) start: u16,
    pub(super) offset: u16,
    pub(super) unused: u32,
    pub(super) launch_time: u64,
}

/// Size of the metadata.
pub(super) const METADATA_LEN: usize = size_of::<Metadata>();
const _: () = assert!(METADATA_LEN == 24 && align_of::<Metadata>() <= 8);
