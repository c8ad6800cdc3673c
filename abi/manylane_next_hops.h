/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Next hops of the peers that the lanes of a lease send to: a file in memory,
 * of a sealed size, which the lessor creates and writes, and the preload
 * library reads. It is passed on by a message of the lease, whose version is
 * also that of this layout. The Rust side is
 * crates/manylane-ipc/src/next_hops.rs; each side asserts sizes and offsets.
 *
 * Numbers are in host byte order. An address is two words, the high one first;
 * IPv4 is mapped (::ffff:a.b.c.d). A MAC is the low six bytes of a word, the
 * first byte lowest.
 */
#ifndef MANYLANE_NEXT_HOPS_H
#define MANYLANE_NEXT_HOPS_H

#include <linux/types.h>
#include <stddef.h>

/* Entries of the table; a power of two. */
#define MLN_ENTRIES 8192
/* Adjacent entries that one pair may use. */
#define MLN_WAYS 8
/* Slots of requests. */
#define MLN_REQUESTS 256

enum mln_request_state {
	MLN_FREE = 0,
	MLN_CLAIMED = 1,   /* being written by a lane */
	MLN_REQUESTED = 2, /* ready for the lessor */
};

/* A lane asks for the next hop of a pair. */
struct mln_request {
	__u32 state; /* enum mln_request_state */
	__u32 pad0;
	__u64 local[2];
	__u64 peer[2];
	__u64 pad1[3];
};

/* A pair and its next hop: two cache lines. */
struct mln_entry {
	__u64 seq; /* odd while the lessor writes */
	__u64 local[2];
	__u64 peer[2];
	__u64 device; /* index << 32 | MTU; 0: the entry is free */
	__u64 mac;    /* of the next hop */
	__u64 source_mac;
	__u64 source[2];
	__u64 used; /* 1: a lane has sent this way since the last check */
	__u64 pad[5];
};

struct mln_next_hops {
	__u32 heartbeat; /* ms of CLOCK_MONOTONIC_COARSE; 0 before the first */
	__u32 pad0;
	__u64 seed; /* of the hash of a pair */
	__u64 pad1[6];
	struct mln_request request[MLN_REQUESTS];
	__u64 pad2[8];
	struct mln_entry entry[MLN_ENTRIES];
};

#define MLN_ASSERT(cond) _Static_assert(cond, #cond)
MLN_ASSERT(sizeof(struct mln_request) == 64);
MLN_ASSERT(offsetof(struct mln_request, local) == 8);
MLN_ASSERT(sizeof(struct mln_entry) == 128);
MLN_ASSERT(offsetof(struct mln_entry, peer) == 24);
MLN_ASSERT(offsetof(struct mln_entry, device) == 40);
MLN_ASSERT(offsetof(struct mln_entry, source) == 64);
MLN_ASSERT(offsetof(struct mln_entry, used) == 80);
MLN_ASSERT(offsetof(struct mln_next_hops, seed) == 8);
MLN_ASSERT(offsetof(struct mln_next_hops, request) == 64);
MLN_ASSERT(offsetof(struct mln_next_hops, entry) == 128 + 64 * MLN_REQUESTS);
MLN_ASSERT(sizeof(struct mln_next_hops) ==
	   128 + 64 * MLN_REQUESTS + 128 * MLN_ENTRIES);

#endif /* MANYLANE_NEXT_HOPS_H */
