/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Messages by which the preload library leases queues of devices: one each in a
 * packet of a local socket (SOCK_SEQPACKET), always of the same size, some with
 * descriptors. The Rust side is crates/manylane-ipc/src/lease.rs, which also
 * has their order; each side asserts sizes, offsets and kinds.
 *
 * Numbers are in host byte order. What a kind does not use is zero.
 */
#ifndef MANYLANE_LEASE_H
#define MANYLANE_LEASE_H

#include <linux/types.h>
#include <stddef.h>

#define MLL_MAGIC 0x334e4c4d /* "MLN3": the version, too */
/* Queues of a lease. */
#define MLL_QUEUES_MAX 32

enum mll_kind {
	MLL_REQUEST = 1, /* with the UDP socket */
	MLL_OPEN = 2,
	MLL_CLOSE = 3,
	MLL_GRANTED = 4, /* with the memory of next hops */
	MLL_REFUSED = 5,
	MLL_QUEUE = 6, /* with the queue's socket and its memory */
	MLL_OPENED = 7,
	MLL_CLOSED = 8,
};

struct mll_queue {
	__u32 ifindex;
	__u32 queue;
	__u32 frames;	      /* in its memory */
	__u32 umem_ring_size; /* entries of the fill and of the completion ring */
	__u32 ring_size;      /* entries of the RX and of the TX ring */
	__u32 is_veth;	      /* not 0: checksums may be partial */
	__u32 lease_id;	      /* 1..65535 */
};

struct mll_message {
	__u32 magic;
	__u32 kind; /* enum mll_kind */
	union {
		__u32 secret[4];	/* MLL_REQUEST */
		__u32 queues;		/* MLL_GRANTED: messages that follow */
		__s32 error;		/* MLL_REFUSED: an errno */
		struct mll_queue queue; /* MLL_QUEUE */
	};
};

#define MLL_ASSERT(cond) _Static_assert(cond, #cond)
MLL_ASSERT(sizeof(struct mll_queue) == 28);
MLL_ASSERT(offsetof(struct mll_queue, umem_ring_size) == 12);
MLL_ASSERT(offsetof(struct mll_queue, lease_id) == 24);
MLL_ASSERT(sizeof(struct mll_message) == 36);
MLL_ASSERT(offsetof(struct mll_message, secret) == 8);
MLL_ASSERT(offsetof(struct mll_message, queue) == 8);

#endif /* MANYLANE_LEASE_H */
