//! Layouts shared by user space and the kernel (linux/io_uring.h), with their constants.

use std::mem::offset_of;

/// Operation codes.
pub(super) const OP_POLL_ADD: u8 = 6;
pub(super) const OP_SENDMSG: u8 = 9;
pub(super) const OP_RECVMSG: u8 = 10;
pub(super) const OP_ASYNC_CANCEL: u8 = 14;
/// Send without a copy of the payload (Linux 6.1).
pub(super) const OP_SENDMSG_ZC: u8 = 48;

/// The descriptor is an index of the registered files.
pub(super) const SQE_FIXED_FILE: u8 = 1 << 0;
/// The kernel selects a buffer.
pub(super) const SQE_BUFFER_SELECT: u8 = 1 << 5;
/// No completion on success (Linux 5.17).
pub(super) const SQE_SKIP_SUCCESS: u8 = 1 << 6;
/// Cancels all requests (Linux 5.19).
pub(super) const CANCEL_ALL: u32 = 1 << 0;
pub(super) const CANCEL_ANY: u32 = 1 << 2;
/// One receive with many completions (Linux 6.0 for recvmsg).
pub(super) const RECV_MULTISHOT: u16 = 1 << 1;

/// `user_data` of cancel requests.
pub(super) const CANCEL_USER_DATA: u64 = 2;

pub(super) const SETUP_CQSIZE: u32 = 1 << 3;
/// The ring starts disabled, so that another thread than its maker can become its submitter (Linux
/// 5.10).
pub(super) const SETUP_R_DISABLED: u32 = 1 << 6;
/// The kernel sets a flag in the ring when there is work for a call (Linux 5.19).
pub(super) const SETUP_TASKRUN_FLAG: u32 = 1 << 9;
/// Only one thread submits (Linux 6.0).
pub(super) const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
/// Work is done only in that thread's calls for completions (Linux 6.1).
pub(super) const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
/// No index array between the submission ring and its entries (Linux 6.6).
pub(super) const SETUP_NO_SQARRAY: u32 = 1 << 16;

pub(super) const FEAT_SINGLE_MMAP: u32 = 1 << 0;
pub(super) const FEAT_NODROP: u32 = 1 << 1;
pub(super) const FEAT_EXT_ARG: u32 = 1 << 8;

pub(super) const OFF_RINGS: i64 = 0;
pub(super) const OFF_SQES: i64 = 0x1000_0000;

pub(super) const ENTER_GETEVENTS: u32 = 1 << 0;
pub(super) const ENTER_EXT_ARG: u32 = 1 << 3;

/// Flags of the submission ring: completions overflowed; there is work for a call.
pub(super) const SQ_CQ_OVERFLOW: u32 = 1 << 1;
pub(super) const SQ_TASKRUN: u32 = 1 << 2;

/// Flags of a completion: its upper half has a buffer id; more completions will follow.
pub(super) const CQE_BUFFER: u32 = 1 << 0;
pub(super) const CQE_MORE: u32 = 1 << 1;
/// The kernel has finished with the payload of a zero-copy send.
pub(super) const CQE_NOTIFY: u32 = 1 << 3;
pub(super) const CQE_BUFFER_SHIFT: u32 = 16;

pub(super) const REGISTER_FILES: u32 = 2;
pub(super) const UNREGISTER_FILES: u32 = 3;
pub(super) const REGISTER_ENABLE_RINGS: u32 = 12;
pub(super) const REGISTER_PBUF_RING: u32 = 22;
/// Linux 6.9.
pub(super) const REGISTER_NAPI: u32 = 27;

/// `struct io_uring_sqe`, as far as it is used here.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Sqe {
    pub(super) opcode: u8,
    pub(super) flags: u8,
    pub(super) ioprio: u16,
    pub(super) fd: i32,
    pub(super) off: u64,
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) msg_flags: u32,
    pub(super) user_data: u64,
    pub(super) buf_group: u16,
    pub(super) personality: u16,
    pub(super) file_index: i32,
    pub(super) pad: [u64; 2],
}

/// `struct io_uring_cqe`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Cqe {
    pub(super) user_data: u64,
    pub(super) res: i32,
    pub(super) flags: u32,
}

/// `struct io_sqring_offsets`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct SqOffsets {
    pub(super) head: u32,
    pub(super) tail: u32,
    pub(super) ring_mask: u32,
    pub(super) ring_entries: u32,
    pub(super) flags: u32,
    pub(super) dropped: u32,
    pub(super) array: u32,
    pub(super) resv1: u32,
    pub(super) user_addr: u64,
}

/// `struct io_cqring_offsets`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct CqOffsets {
    pub(super) head: u32,
    pub(super) tail: u32,
    pub(super) ring_mask: u32,
    pub(super) ring_entries: u32,
    pub(super) overflow: u32,
    pub(super) cqes: u32,
    pub(super) flags: u32,
    pub(super) resv1: u32,
    pub(super) user_addr: u64,
}

/// `struct io_uring_params`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Params {
    pub(super) sq_entries: u32,
    pub(super) cq_entries: u32,
    pub(super) flags: u32,
    pub(super) sq_thread_cpu: u32,
    pub(super) sq_thread_idle: u32,
    pub(super) features: u32,
    pub(super) wq_fd: u32,
    pub(super) resv: [u32; 3],
    pub(super) sq_off: SqOffsets,
    pub(super) cq_off: CqOffsets,
}

/// `struct io_uring_buf`: an entry of a buffer ring. The last word of the first entry is the
/// ring's tail.
#[repr(C)]
pub(super) struct Buf {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) bid: u16,
    pub(super) tail: u16,
}

/// `struct io_uring_buf_reg`.
#[derive(Default)]
#[repr(C)]
pub(super) struct BufReg {
    pub(super) ring_addr: u64,
    pub(super) ring_entries: u32,
    pub(super) bgid: u16,
    pub(super) flags: u16,
    pub(super) resv: [u64; 3],
}

/// `struct io_uring_napi`: how long waits poll the devices of their sockets.
#[derive(Default)]
#[repr(C)]
pub(super) struct Napi {
    pub(super) busy_poll_to: u32,
    pub(super) prefer_busy_poll: u8,
    pub(super) opcode: u8,
    pub(super) pad: [u8; 2],
    pub(super) op_param: u32,
    pub(super) resv: u32,
}

/// `struct io_uring_getevents_arg`.
#[repr(C)]
pub(super) struct GetEventsArg {
    pub(super) sigmask: u64,
    pub(super) sigmask_sz: u32,
    pub(super) min_wait_usec: u32,
    pub(super) ts: u64,
}

/// `struct __kernel_timespec`.
#[repr(C)]
pub(super) struct Timespec {
    pub(super) sec: i64,
    pub(super) nsec: i64,
}

/// `struct io_uring_recvmsg_out`: what a multishot receive writes before the address, the control
/// messages and the payload.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RecvmsgOut {
    pub(super) namelen: u32,
    pub(super) controllen: u32,
    pub(super) payloadlen: u32,
    pub(super) flags: u32,
}

const _: () = {
    assert!(size_of::<Sqe>() == 64);
    assert!(offset_of!(Sqe, addr) == 16 && offset_of!(Sqe, msg_flags) == 28);
    assert!(offset_of!(Sqe, user_data) == 32 && offset_of!(Sqe, buf_group) == 40);
    assert!(size_of::<Cqe>() == 16 && offset_of!(Cqe, flags) == 12);
    assert!(size_of::<SqOffsets>() == 40 && offset_of!(SqOffsets, array) == 24);
    assert!(size_of::<CqOffsets>() == 40 && offset_of!(CqOffsets, cqes) == 20);
    assert!(size_of::<Params>() == 120 && offset_of!(Params, features) == 20);
    assert!(offset_of!(Params, sq_off) == 40 && offset_of!(Params, cq_off) == 80);
    assert!(size_of::<Buf>() == 16 && offset_of!(Buf, tail) == 14);
    assert!(size_of::<BufReg>() == 40 && offset_of!(BufReg, bgid) == 12);
    assert!(size_of::<Napi>() == 16 && offset_of!(Napi, op_param) == 8);
    assert!(size_of::<GetEventsArg>() == 24 && offset_of!(GetEventsArg, ts) == 16);
    assert!(size_of::<RecvmsgOut>() == 16);
};
