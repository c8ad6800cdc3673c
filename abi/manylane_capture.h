/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The ring of captured frames: two files in memory, of sealed sizes, which the
 * process with the lanes creates. It writes the first, which the capturing
 * process maps read-only; that process writes the first word of the second. The
 * Rust side is crates/manylane-ipc/src/capture/ring.rs, which also says in
 * which order both sides write; each side asserts sizes and offsets.
 *
 * All of it is 64-bit words in host byte order, read and written one by one.
 * The records follow the table of devices, at a multiple of 16 words. A record
 * is its header, then the kept bytes of the frame, up to a whole word. The next
 * one follows it; the ring wraps around at any word.
 */
#ifndef MANYLANE_CAPTURE_H
#define MANYLANE_CAPTURE_H

#include <linux/types.h>
#include <stddef.h>

/* "mlanecap" in memory, then XORed with the version. */
#define MLC_MAGIC "mlanecap"
#define MLC_VERSION 1
/* Devices with counters of their own. */
#define MLC_DEVICES_MAX 1024
/* Bytes that are kept of a frame. */
#define MLC_SNAPLEN_MAX 65535

/* Frames of a device that found no room. */
struct mlc_device {
	__u64 ifindex; /* 0, the last entry: all other devices */
	__u64 dropped_in;
	__u64 dropped_out;
	__u64 pad;
};

struct mlc_ring {
	__u64 magic;
	__u64 capacity; /* words of records; a power of two */
	__u64 devices;	/* entries of the table but the last */
	__u64 closed;	/* not 0: the producer is gone */
	__u64 pad0[4];
	__u64 produced; /* words of records so far */
	__u64 pad1[7];
	struct mlc_device device[];
};

struct mlc_record {
	__u64 lens;  /* kept bytes | bytes of the frame << 32 */
	__u64 time;  /* ns since 1970 */
	__u64 place; /* ifindex | queue << 32 | MLC_OUT */
};
#define MLC_OUT (1ULL << 63) /* sent, not received */

#define MLC_ASSERT(cond) _Static_assert(cond, #cond)
MLC_ASSERT(sizeof(struct mlc_device) == 8 * 4);
MLC_ASSERT(offsetof(struct mlc_ring, capacity) == 8 * 1);
MLC_ASSERT(offsetof(struct mlc_ring, devices) == 8 * 2);
MLC_ASSERT(offsetof(struct mlc_ring, closed) == 8 * 3);
MLC_ASSERT(offsetof(struct mlc_ring, produced) == 8 * 8);
MLC_ASSERT(offsetof(struct mlc_ring, device) == 8 * 16);
MLC_ASSERT(sizeof(struct mlc_record) == 8 * 3);

#endif /* MANYLANE_CAPTURE_H */
