/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * What programs ask of manylane.ko.
 *
 * MANYLANE_ATTACH goes to the device /dev/manylane and names a UDP socket by
 * its descriptor. All other requests go to the descriptor of that socket.
 * Fields named reserved have to be zero. Addresses are 64 bits on every
 * architecture; programs of 32 bits on a kernel of 64 bits can attach, and no
 * more.
 */
#ifndef MANYLANE_IOCTL_H
#define MANYLANE_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define MANYLANE_DEVICE "/dev/manylane"
#define MANYLANE_VERSION 1

/* More than processors of one machine; each queue is a socket of the kernel. */
#define MANYLANE_QUEUES_MAX 1024
/* One registration: what the kernel remembers of it is bounded. */
#define MANYLANE_HEADERS_MAX (1 << 16)
#define MANYLANE_SEGMENTS_MAX (1 << 17)

enum manylane_policy {
	MANYLANE_ROUND_ROBIN = 0, /* the next queue, exactly */
	MANYLANE_FLOW = 1,	  /* by addresses and ports */
};

struct manylane_attach {
	__u32 version; /* MANYLANE_VERSION */
	__s32 fd;
	__u32 policy;
	__u32 queues; /* 0: one for each processor that is online */
	__u64 reserved[2];
};

/*
 * Remembers an array of struct mmsghdr, as recvmmsg() has it, in place of the
 * one before. A count of 0 forgets it. The kernel reads the array now, and not
 * again: later changes of it have no effect.
 */
struct manylane_register {
	__u32 version;
	__u32 count;
	__u64 headers; /* struct mmsghdr[count] */
	__u64 results; /* struct manylane_result[count], written by receives */
	__u64 reserved[2];
};

/* What a receive found out about a message: recvmsg() returns it in msghdr. */
struct manylane_result {
	__u64 controllen;
	__u32 len;
	__u32 namelen;
	__u32 flags;
	__u32 reserved;
};

/*
 * Receives into the remembered headers FIRST to FIRST + COUNT - 1; returns how
 * many have a message. The flags are MSG_DONTWAIT, MSG_WAITFORONE, MSG_TRUNC
 * and MSG_CMSG_CLOEXEC, with the meaning that they have for recvmmsg().
 */
struct manylane_receive {
	__u32 first;
	__u32 count;
	__u32 flags;
	__u32 reserved;
};

/*
 * At rest, arrived is the sum of own, stolen, moved, full, no_memory and the
 * datagrams that are queued.
 */
struct manylane_queue_counts {
	__u64 arrived;	 /* that the policy gave to this queue */
	__u64 own;	 /* received by a thread on a processor of this queue */
	__u64 stolen;	 /* received by another thread */
	__u64 moved;	 /* to the socket's own queue: MSG_PEEK, SIOCINQ */
	__u64 full;	 /* dropped: SO_RCVBUF is exceeded */
	__u64 no_memory; /* dropped: net.ipv4.udp_mem or a cgroup is exceeded */
};

struct manylane_counts {
	__u32 version;
	__u32 queues;	/* in: room in the array; out: queues of the socket */
	__u64 array;	/* struct manylane_queue_counts[queues], may be 0 */
	__u64 left;	/* out: left to the socket's own queue */
	__u64 filtered; /* out: dropped by a filter of the socket */
	__u64 reserved[2];
};

/* Returns the number of queues. */
#define MANYLANE_ATTACH _IOW(0xBD, 0x01, struct manylane_attach)
#define MANYLANE_REGISTER _IOW(0xBD, 0x02, struct manylane_register)
#define MANYLANE_RECEIVE _IOW(0xBD, 0x03, struct manylane_receive)
#define MANYLANE_COUNTS _IOWR(0xBD, 0x04, struct manylane_counts)

#endif
