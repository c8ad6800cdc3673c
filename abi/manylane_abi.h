/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Layouts that the eBPF programs share with user space. The Rust side is
 * bpf/src/abi.rs; each side asserts sizes and offsets, so that neither can
 * drift alone.
 */
#ifndef MANYLANE_ABI_H
#define MANYLANE_ABI_H

#include <linux/types.h>
#include <stddef.h>

/* Slots of the socket array: lanes that can be open at one time. */
#define ML_LANES_MAX 256
/* Entries of the steering table; a power of two. */
#define ML_TABLE_SIZE 1024
/* Bytes of payload that a key can span. */
#define ML_KEY_MAX 64

/* Steering policies; the numbers are the order of Steering in Rust. */
enum ml_policy {
	ML_FLOW = 0,
	ML_ROUND_ROBIN = 1,
	ML_CPU = 2,
	ML_RANDOM = 3,
	ML_LEAST_LOADED = 4,
	ML_KEY = 5,
};

/*
 * The steering table. Every entry always names an open lane, so that a reader
 * may see any mix of two updates and still steer to a lane that drains.
 */
struct ml_table {
	__u32 size;		   /* entries in use, 1..ML_TABLE_SIZE */
	__u32 lane[ML_TABLE_SIZE]; /* entry -> slot of the socket array */
	__u32 pad;
};

/* Load of one lane: two cache lines, one written by each side. */
struct ml_load {
	__u64 steered; /* messages sent to the lane, by this program */
	__u64 pad0[7];
	__u64 received; /* messages that the lane has received, by the lane's thread */
	__u64 pad1[7];
};

/* Per-CPU counters of the steering program; what was steered is counted per lane. */
enum ml_steer_count {
	ML_STEER_SHORT = 0,  /* payload shorter than the key: steered by flow */
	ML_STEER_KERNEL = 1, /* left to the kernel's choice: no such lane */
	ML_STEER_COUNTS = 2,
};

/* Queues of one device that XDP serves, and sockets that may share a device. */
#define ML_QUEUES_MAX 128
#define ML_SOCKETS_MAX 16

/* An address that a socket receives at. IPv4 is mapped (::ffff:a.b.c.d). */
struct ml_addr {
	__u8 ip[16];
};

/*
 * The key of a bound port; one entry for each local address of a wildcard. TCP
 * also has blocks of ports, for connections to others: `port` is the first one.
 */
struct ml_port {
	struct ml_addr addr;
	__be16 port;
	__u8 protocol; /* IPPROTO_UDP or IPPROTO_TCP */
	__u8 is_block;
};
/* Ports of a block, of which the first is a multiple of this; a power of two. */
#define ML_PORT_BLOCK 256

/*
 * A Bloom filter of our own addresses: its words, and the factor of its hash,
 * the upper byte of the product with the exclusive or of an address's words.
 */
#define ML_LOCAL_WORDS 4
#define ML_LOCAL_FACTOR 0x9e3779b1U

/* The device of an XDP program. */
struct ml_device {
	__u8 mac[6];
	__u16 takes_tcp; /* 1 if a port of TCP is bound */
	__u32 longest;	 /* bytes of the longest frame that an XSK takes */
	__u32 pad2;
	/* The Bloom filter of our own addresses. */
	__u64 locals[ML_LOCAL_WORDS];
};

/* Limits that one socket may have at a time. */
#define ML_LIMITS_MAX 2
/* Prefixes that the sockets of one device can have together. */
#define ML_RULES_MAX 16384

/* Address families in the keys of rules and buckets. */
enum ml_family {
	ML_IP4 = 0,
	ML_IP6 = 1,
	ML_FAMILIES = 2,
};

/*
 * A limit of each source: a token bucket, counted in time. The mask of its
 * family, in network order, is applied to an address: the result is the
 * source.
 */
struct ml_limit {
	__u64 cost; /* nanoseconds that a datagram costs; 0: no limit */
	__u64 room; /* nanoseconds that a source may be ahead of the clock */
	__u32 mask[ML_FAMILIES][4];
};

/* The filter of one socket. All zeroes: it admits every datagram. */
struct ml_filter {
	__u32 rules;	  /* 1 if it has prefixes, else 0 */
	__u32 generation; /* of its limits; each generation has its own buckets */
	struct ml_limit limit[ML_LIMITS_MAX]; /* the widest first */
};

/* A prefix of a socket. The key of a trie: bits that count, then the bits. */
struct ml_rule {
	__u32 bits; /* those of number, family and pad among them */
	__u8 socket;
	__u8 family;
	__u16 pad;
	__u8 ip[16]; /* IPv4 is mapped */
};
#define ML_RULE_HEAD 32

/* The verdict of a rule. */
enum ml_rule_value {
	ML_ALLOW = 1, /* neither denied nor limited */
	ML_DENY = 2,
};

/* The key of a bucket: a source of a socket. */
struct ml_source {
	__u32 generation;
	__u8 socket;
	__u8 family;
	__u16 pad;
	__u8 ip[16];
};

/* Datagrams of a socket that its filter dropped, per CPU. */
struct ml_filter_drops {
	__u64 denied;
	__u64 limited;
};

/*
 * Per-CPU counters of the XDP program: redirected frames, and reasons for which
 * frames were left to the kernel or dropped. Each frame is counted once.
 */
enum ml_xdp_count {
	ML_XDP_REDIRECTED = 0, /* to the XSK of a lane */
	ML_XDP_OTHER_MAC = 1,  /* not to this device's own address */
	ML_XDP_OTHER_VLAN = 2, /* a VLAN that no lane takes */
	ML_XDP_NOT_UDP = 3,    /* not IP, not UDP, nor TCP to be taken */
	ML_XDP_FRAGMENT_OR_OPTIONS = 4, /* fragment, options, extensions */
	ML_XDP_PARTIAL_CHECKSUM = 5,	/* checksum looks partial: maybe GSO */
	ML_XDP_NO_PORT = 6,		/* to no bound address and port */
	ML_XDP_BAD_SOURCE = 7, /* from an address that cannot be answered */
	ML_XDP_TOO_LONG = 8,   /* longer than a frame of an XSK */
	ML_XDP_NO_LANE = 9,    /* a queue that no lane serves */
	ML_XDP_DENIED = 10,    /* dropped: from a prefix that is denied */
	ML_XDP_LIMITED = 11,   /* dropped: its source sends too much */
	ML_XDP_COUNTS = 12,
};

/*
 * The rx hint: the XDP program writes the layout of a frame, and where its
 * payload is, into its first bytes. No frame that comes from a device to its
 * own address begins with the first bit set.
 */
struct ml_rx_hint {
	__u8 kind;   /* enum ml_rx_hint_kind */
	__u8 rest;   /* as it was */
	__u16 bytes; /* of payload, in the machine's byte order */
};
/* The longest UDP datagram, with its header, that gets a hint. */
#define ML_RX_HINT_UDP_MAX 72

enum ml_rx_hint_kind {
	ML_RX_HINT = 1, /* IP without tags or options, all lengths right */
	/* Bytes before the payload: numbers with the bits of ML_RX_HINT_HEADERS_MASK. */
	ML_RX_HINT_V4 = 42,
	ML_RX_HINT_V6 = 62,
	ML_RX_HINT_HEADERS_MASK = 62,
	ML_RX_HINT_PARTIAL = 64, /* the checksum is that of the pseudo header */
};

#ifdef __bpf__
#define ML_ASSERT(cond) _Static_assert(cond, #cond)
ML_ASSERT(sizeof(struct ml_table) == 8 + 4 * ML_TABLE_SIZE);
ML_ASSERT(offsetof(struct ml_table, lane) == 4);
ML_ASSERT(sizeof(struct ml_load) == 128);
ML_ASSERT(offsetof(struct ml_load, received) == 64);
ML_ASSERT(sizeof(struct ml_port) == 20);
ML_ASSERT(offsetof(struct ml_port, port) == 16);
ML_ASSERT(offsetof(struct ml_port, protocol) == 18);
ML_ASSERT(offsetof(struct ml_port, is_block) == 19);
ML_ASSERT(sizeof(struct ml_device) == 48);
ML_ASSERT(offsetof(struct ml_device, takes_tcp) == 6);
ML_ASSERT(offsetof(struct ml_device, longest) == 8);
ML_ASSERT(offsetof(struct ml_device, locals) == 16);
ML_ASSERT(sizeof(struct ml_limit) == 48);
ML_ASSERT(offsetof(struct ml_limit, mask) == 16);
ML_ASSERT(sizeof(struct ml_filter) == 8 + 48 * ML_LIMITS_MAX);
ML_ASSERT(offsetof(struct ml_filter, limit) == 8);
ML_ASSERT(sizeof(struct ml_rule) == 24);
ML_ASSERT(offsetof(struct ml_rule, ip) == 8);
ML_ASSERT(sizeof(struct ml_source) == 24);
ML_ASSERT(offsetof(struct ml_source, ip) == 8);
ML_ASSERT(sizeof(struct ml_filter_drops) == 16);
ML_ASSERT(sizeof(struct ml_rx_hint) == 4);
ML_ASSERT(offsetof(struct ml_rx_hint, bytes) == 2);
#endif

#endif /* MANYLANE_ABI_H */
