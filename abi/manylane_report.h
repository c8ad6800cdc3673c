/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The report of the preload library: a file in memory, of a sealed size. The
 * launcher creates it, and the library maps it shared in its constructor, so
 * that it outlives fork, chroot, dropped privileges and closed descriptors.
 * Started programs find it by a descriptor that they inherit, or in
 * /proc/LAUNCHER/fd. The Rust side is crates/manylane-ipc/src/report/; each
 * side asserts sizes and offsets.
 *
 * The file is zero except the header's first four words, which the launcher
 * writes. A slot is claimed by compare-and-exchange of its state. After that
 * only its owner writes it, with relaxed stores. All numbers are in host byte
 * order, except ports, which are in network byte order.
 */
#ifndef MANYLANE_REPORT_H
#define MANYLANE_REPORT_H

#include <linux/types.h>
#include <stddef.h>

#define MLS_MAGIC 0x48534c4d /* "MLSH" */
#define MLS_VERSION 4
/* Slots of receivers. */
#define MLS_RECEIVERS 1024
/* Slots of reasons; those without a name are zero. */
#define MLS_REASONS 32
/* In place of a lane's number: the receiver shares the program's own socket. */
#define MLS_NO_LANE 0xffffffff

/* State of a slot. A slot that ended keeps its counts until it is needed again. */
enum mls_state {
	MLS_FREE = 0,
	MLS_CLAIMED = 1, /* being filled */
	MLS_OPEN = 2,
	MLS_ENDED = 3,
};

/* Reasons why a socket stays plain, or became plain again. */
enum mls_reason_id {
	MLS_CONNECT = 0,     /* connect() */
	MLS_REUSEPORT = 1,   /* the program shares the port by itself */
	MLS_OPTION = 2,	     /* an option that a lane cannot mirror */
	MLS_MULTICAST = 3,   /* a membership: every lane would get a copy */
	MLS_ERROR_QUEUE = 4, /* IP_RECVERR: an error goes to one lane only */
	MLS_PASSED = 5,	     /* SCM_RIGHTS: another process receives, too */
	MLS_EXEC = 6,	     /* the descriptor stays open across exec */
	MLS_PATTERN =
		7, /* receivers that do not wait, or waiters that do not receive */
	MLS_SHARED_EPOLL =
		8, /* several threads or processes wait on one epoll instance */
	MLS_NESTED_EPOLL = 9, /* an epoll instance in another one */
	MLS_EVENTS = 10,  /* EPOLLONESHOT, or a poll of too many descriptors */
	MLS_SIGNALS = 11, /* handlers both with and without SA_RESTART */
	MLS_NO_SOCKET =
		12, /* a lane's socket cannot be opened or bound: descriptors, privileges */
	MLS_FULL = 13, /* a table of the library, or the limit of open files */
	MLS_ADDRESS = 14,  /* bound to a multicast or broadcast address */
	MLS_IOCTL = 15,	   /* an ioctl or fcntl that a lane cannot mirror */
	MLS_SHUTDOWN = 16, /* shutdown() */
	/* Engine xdp: the socket has its lanes, and no queues. */
	MLS_NO_QUEUE = 17, /* no device has its address, or no queue is free */
	MLS_CONTROL = 18,  /* options that only the kernel's socket honours */
	MLS_NO_LEASE = 19, /* the launcher leased none */
	MLS_FORKED = 20,   /* forked before there were lanes */
	MLS_REPLY_FAILED = 21, /* a reply that was sent together with others */
	MLS_NAMESPACE = 22,    /* receivers in another network namespace */
	MLS_INHERITED = 23,    /* bound before the program was started */
	MLS_SECCOMP = 24,      /* the program forbade itself system calls */
	MLS_REASONS_USED = 25,
};

/* A bound address; family 0 if there is none. */
struct mls_addr {
	__u16 family;
	__be16 port;
	__u32 pad;
	__u8 ip[16]; /* IPv4 in the first four */
};

struct mls_header {
	__u32 magic;
	__u32 version;
	__u32 receivers; /* MLS_RECEIVERS */
	__u32 reasons;	 /* MLS_REASONS */
	__u32 processes; /* that loaded the library, or were forked by such; each adds itself */
	__u32 last_pid; /* the last of those */
	__u32 full;	/* receivers that found no slot */
	__u32 sockets;	/* UDP sockets bound to a port of MANYLANE_PORTS */
	__u64 pad[4];
};

/* A thread that receives on a socket: two cache lines, written only by it. */
struct mls_receiver {
	__u32 state; /* enum mls_state */
	__u32 pid;
	__u32 tid;
	__u32 lane; /* current lane; MLS_NO_LANE if none */
	struct mls_addr addr;
	__u64 delivered;
	__u64 delivered_bytes;
	__u64 batches; /* receive calls that returned datagrams */
	__u64 delivered_from_other_lanes; /* of delivered: from another thread's lane */
	__u64 delivered_by_bypass; /* of delivered: past the kernel's stack */
	__u64 bad_frames;	   /* dropped: malformed, or a wrong checksum */
	__u64 sent;
	__u64 sent_bytes;
	__u64 send_calls;
	__u64 sent_by_bypass;
	__u64 inode; /* of the kernel socket of its lane; 0 if not known */
};

struct mls_reason {
	__u64 count;
	__u32 last_pid;
	__u32 pad;
	struct mls_addr last_addr;
	__u64 pad1[3];
};

struct mls_report {
	struct mls_header header;
	struct mls_reason reason[MLS_REASONS];
	struct mls_receiver receiver[MLS_RECEIVERS];
};

#define MLS_ASSERT(cond) _Static_assert(cond, #cond)
MLS_ASSERT(sizeof(struct mls_addr) == 24);
MLS_ASSERT(sizeof(struct mls_header) == 64);
MLS_ASSERT(offsetof(struct mls_header, processes) == 16);
MLS_ASSERT(offsetof(struct mls_header, sockets) == 28);
MLS_ASSERT(sizeof(struct mls_reason) == 64);
MLS_ASSERT(offsetof(struct mls_reason, last_addr) == 16);
MLS_ASSERT(sizeof(struct mls_receiver) == 128);
MLS_ASSERT(offsetof(struct mls_receiver, addr) == 16);
MLS_ASSERT(offsetof(struct mls_receiver, delivered) == 40);
MLS_ASSERT(offsetof(struct mls_receiver, delivered_from_other_lanes) == 64);
MLS_ASSERT(offsetof(struct mls_receiver, sent_by_bypass) == 112);
MLS_ASSERT(offsetof(struct mls_receiver, inode) == 120);
MLS_ASSERT(offsetof(struct mls_report, receiver) == 64 + 64 * MLS_REASONS);

#endif /* MANYLANE_REPORT_H */
