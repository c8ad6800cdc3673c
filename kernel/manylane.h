/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What the files of the module share, in the order in which a datagram meets
 * them: attach.c, arrive.c, errors.c, queue.c, sleep.c, receive.c, headers.c.
 * README.md has the stages, the owners and the locks.
 */
#ifndef MANYLANE_H
#define MANYLANE_H

#include <linux/kref.h>
#include <linux/net.h>
#include <linux/percpu.h>
#include <linux/udp.h>
#include <linux/workqueue.h>
#include <net/sock.h>

#include "manylane_ioctl.h"

struct ml_headers;

/*
 * One queue: the receive queue of a UDP socket of the kernel that is bound to
 * nothing, so that locks, limits and accounting of memory are UDP's own.
 */
struct ml_queue {
	struct socket *sock;
	struct ml_socket *owner;
	struct manylane_queue_counts __percpu *counts;

	spinlock_t sleep_lock; /* the list, and ml_socket.asleep beside it */
	struct list_head
		asleep; /* struct ml_sleeper, the first one sleeps longest */
} ____cacheline_aligned_in_smp;

/* Counts that belong to no queue. */
struct ml_socket_counts {
	u64 left;
	u64 filtered;
};

/* What a socket has while it is attached: from ml_attach() to its last reference. */
struct ml_socket {
	u32 policy;
	u32 count; /* of queues */
	u32 seed;  /* of the hash of flows */

	/* See leave_to_stranger(); the time is in jiffies. */
	bool strangers;
	unsigned long stranger_seen;

	/* What the socket had before. */
	const struct proto_ops *base_ops;
	struct proto *base_proto;
	void (*base_data_ready)(struct sock *sk);
	void (*base_state_change)(struct sock *sk);
	void (*base_error_report)(struct sock *sk);
	void (*base_destruct)(struct sock *sk);

	struct net *net; /* held: the sockets of the queues do not */
	struct work_struct free_work;
	struct ml_socket_counts __percpu *counts;

	spinlock_t headers_lock;
	struct ml_headers *headers; /* the registration, or NULL */

	/* Written for each datagram, by the policy round-robin alone. */
	atomic_t next ____cacheline_aligned_in_smp;
	/* Written when a thread goes to sleep or is woken. */
	atomic_t asleep ____cacheline_aligned_in_smp;

	struct ml_queue queues[];
};

/* A thread that waits for a datagram; on its stack. */
struct ml_sleeper {
	struct list_head node; /* empty once it was woken */
	struct task_struct *task;
	struct ml_queue *queue;
};

/* The state of a socket whose operations are ours. */
static inline struct ml_socket *ml_of(const struct sock *sk)
{
	/* Pairs with smp_wmb() of take_over(): whoever has our operations sees our state. */
	smp_rmb();
	return rcu_dereference_raw(__sk_user_data(sk));
}

static inline struct ml_queue *ml_own_queue(struct ml_socket *ml)
{
	return &ml->queues[raw_smp_processor_id() % ml->count];
}

/* The socket's own queue: what was there before, and what arrive.c leaves to UDP. */
static inline bool ml_base_readable(struct sock *sk)
{
	return !skb_queue_empty_lockless(&sk->sk_receive_queue) ||
	       !skb_queue_empty_lockless(&udp_sk(sk)->reader_queue);
}

static inline bool ml_queue_readable(const struct ml_queue *queue)
{
	return ml_base_readable(queue->sock->sk);
}

/* attach.c */
int ml_attach(struct socket *sock, u32 policy, u32 queues);
int ml_attach_init(void);
void ml_attach_exit(void);

/* arrive.c */
int ml_arrive(struct sock *sk, struct sk_buff *skb);
struct ml_queue *ml_pick(struct ml_socket *ml, const struct sk_buff *skb);

/* errors.c */
void ml_set_error_handler(struct sock *sk);

/* queue.c */
struct ml_socket *ml_socket_create(struct net *net, u32 policy, u32 queues);
void ml_socket_free(struct ml_socket *ml);
int ml_queue_add(struct ml_queue *queue, struct sock *sk, struct sk_buff *skb);
struct sk_buff *ml_take(struct ml_socket *ml);
bool ml_readable(const struct ml_socket *ml);
bool ml_move_to_base(struct ml_socket *ml, struct sock *sk);
bool ml_give_to_base(struct sock *sk, struct sk_buff *skb);
int ml_copy_counts(struct ml_socket *ml, void __user *to);

/* sleep.c */
int ml_sleep(struct ml_socket *ml, struct sock *sk, long *timeout);
void ml_wake_one(struct ml_queue *first);
void ml_wake_all(struct ml_socket *ml);

/* receive.c */
int ml_recvmsg(struct sock *sk, struct msghdr *msg, size_t len, int flags,
	       int *addr_len);
__poll_t ml_poll(struct file *file, struct socket *sock, poll_table *wait);
int ml_ioctl(struct socket *sock, unsigned int cmd, unsigned long arg);
int ml_setsockopt(struct sock *sk, int level, int name, sockptr_t value,
		  unsigned int len);

/* headers.c */
int ml_headers_register(struct ml_socket *ml, void __user *from);
int ml_headers_receive(struct socket *sock, void __user *from);
void ml_headers_forget(struct ml_socket *ml);

/* selftest.c */
#ifdef MANYLANE_SELFTEST
int ml_selftest(void);
#else
static inline int ml_selftest(void)
{
	return 0;
}
#endif

#endif
