// SPDX-License-Identifier: GPL-2.0-only
/*
 * Queues. Each is the receive queue of a UDP socket of the kernel: datagrams are
 * added and taken by UDP's own functions, which account for memory. SO_RCVBUF
 * of the attached socket bounds each of its queues.
 */
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <net/net_namespace.h>
#include <net/udp.h>

#include "manylane.h"

static int create_queue(struct ml_queue *queue, struct ml_socket *ml)
{
	int err;

	queue->owner = ml;
	spin_lock_init(&queue->sleep_lock);
	INIT_LIST_HEAD(&queue->asleep);
	queue->counts = alloc_percpu(struct manylane_queue_counts);
	if (!queue->counts)
		return -ENOMEM;
	/* The family is of no importance for a socket that is not bound. */
	err = sock_create_kern(ml->net, AF_INET, SOCK_DGRAM, IPPROTO_UDP,
			       &queue->sock);
	if (err) {
		queue->sock = NULL;
		return err;
	}
#ifdef CONFIG_NET_RX_BUSY_POLL
	/* By net.core.busy_read: it would poll devices for an empty queue. */
	queue->sock->sk->sk_ll_usec = 0;
#endif
	return 0;
}

/* Process context. */
struct ml_socket *ml_socket_create(struct net *net, u32 policy, u32 queues)
{
	struct ml_socket *ml;
	int err = -ENOMEM;
	u32 i;

	ml = kvzalloc(struct_size(ml, queues, queues), GFP_KERNEL_ACCOUNT);
	if (!ml)
		return ERR_PTR(err);
	ml->policy = policy;
	ml->seed = get_random_u32();
	ml->net = get_net(net);
	spin_lock_init(&ml->headers_lock);
	ml->counts = alloc_percpu(struct ml_socket_counts);
	if (!ml->counts)
		goto fail;
	for (i = 0; i < queues; i++) {
		/* Before: what is there of it is freed. */
		ml->count++;
		err = create_queue(&ml->queues[i], ml);
		if (err)
			goto fail;
	}
	return ml;
fail:
	ml_socket_free(ml);
	return ERR_PTR(err);
}

/* Process context; no datagram arrives, nobody receives. What is queued is lost. */
void ml_socket_free(struct ml_socket *ml)
{
	u32 i;

	ml_headers_forget(ml);
	for (i = 0; i < ml->count; i++) {
		if (ml->queues[i].sock)
			sock_release(ml->queues[i].sock);
		free_percpu(ml->queues[i].counts);
	}
	free_percpu(ml->counts);
	put_net(ml->net);
	kvfree(ml);
}

/* Softirqs. On an error the skb is still the caller's: -ENOMEM if the queue is full. */
int ml_queue_add(struct ml_queue *queue, struct sock *sk, struct sk_buff *skb)
{
	struct sock *behind = queue->sock->sk;
	int limit = READ_ONCE(sk->sk_rcvbuf);
	int err;

	if (READ_ONCE(behind->sk_rcvbuf) != limit)
		WRITE_ONCE(behind->sk_rcvbuf, limit);
	this_cpu_inc(queue->counts->arrived);
	err = __udp_enqueue_schedule_skb(behind, skb);
	if (err == -ENOMEM)
		this_cpu_inc(queue->counts->full);
	else if (err)
		this_cpu_inc(queue->counts->no_memory);
	return err;
}

static struct sk_buff *take_from(struct ml_queue *queue)
{
	int offset = 0, err;

	if (!ml_queue_readable(queue))
		return NULL;
	return __skb_recv_udp(queue->sock->sk, MSG_DONTWAIT, &offset, &err);
}

static bool has_reader(const struct ml_queue *queue)
{
	return spin_is_locked(&udp_sk(queue->sock->sk)->reader_queue.lock);
}

/*
 * The queue of this processor first, then those after it, at first without those
 * that a reader is at: it would be waited for. Process context.
 */
static struct sk_buff *take(struct ml_socket *ml, struct ml_queue **from)
{
	struct ml_queue *own = ml_own_queue(ml), *end = ml->queues + ml->count;
	struct ml_queue *queue = own;
	bool all = false, skipped = false;
	struct sk_buff *skb;

again:
	do {
		if (!all && queue != own && has_reader(queue)) {
			skipped = true;
		} else {
			skb = take_from(queue);
			if (skb) {
				*from = queue;
				return skb;
			}
		}
		if (++queue == end)
			queue = ml->queues;
	} while (queue != own);
	if (skipped && !all) {
		all = true;
		goto again;
	}
	return NULL;
}

struct sk_buff *ml_take(struct ml_socket *ml)
{
	struct ml_queue *from;
	struct sk_buff *skb = take(ml, &from);

	if (!skb)
		return NULL;
	if (from == ml_own_queue(ml))
		this_cpu_inc(from->counts->own);
	else
		this_cpu_inc(from->counts->stolen);
	return skb;
}

/* Without locks: for poll, where a datagram that comes later wakes again. */
bool ml_readable(const struct ml_socket *ml)
{
	u32 i;

	for (i = 0; i < ml->count; i++)
		if (ml_queue_readable(&ml->queues[i]))
			return true;
	return false;
}

/*
 * A datagram goes to the socket's own queue, which is read first. UDP's functions
 * then do what they can do there only. False if it was dropped.
 */
bool ml_give_to_base(struct sock *sk, struct sk_buff *skb)
{
	int err;

	/* Its lock is otherwise taken in softirqs. */
	local_bh_disable();
	err = __udp_enqueue_schedule_skb(sk, skb);
	local_bh_enable();
	if (err)
		kfree_skb(skb);
	return !err;
}

/* False if there is nothing to move. */
bool ml_move_to_base(struct ml_socket *ml, struct sock *sk)
{
	struct ml_queue *from;
	struct sk_buff *skb = take(ml, &from);

	if (!skb)
		return false;
	this_cpu_inc(from->counts->moved);
	ml_give_to_base(sk, skb);
	return true;
}

static struct manylane_queue_counts sum(const struct ml_queue *queue)
{
	struct manylane_queue_counts total = {};
	int cpu;

	for_each_possible_cpu (cpu) {
		struct manylane_queue_counts *part =
			per_cpu_ptr(queue->counts, cpu);

		total.arrived += part->arrived;
		total.own += part->own;
		total.stolen += part->stolen;
		total.moved += part->moved;
		total.full += part->full;
		total.no_memory += part->no_memory;
	}
	return total;
}

/* MANYLANE_COUNTS. Process context. */
int ml_copy_counts(struct ml_socket *ml, void __user *to)
{
	struct manylane_queue_counts __user *array;
	struct manylane_queue_counts total;
	struct manylane_counts counts;
	u32 i, room;
	int cpu;

	if (copy_from_user(&counts, to, sizeof(counts)))
		return -EFAULT;
	if (counts.version != MANYLANE_VERSION || counts.reserved[0] ||
	    counts.reserved[1])
		return -EINVAL;
	array = u64_to_user_ptr(counts.array);
	room = array ? counts.queues : 0;
	for (i = 0; i < min(room, ml->count); i++) {
		total = sum(&ml->queues[i]);
		if (copy_to_user(&array[i], &total, sizeof(total)))
			return -EFAULT;
	}
	counts.queues = ml->count;
	counts.left = 0;
	counts.filtered = 0;
	for_each_possible_cpu (cpu) {
		counts.left += per_cpu_ptr(ml->counts, cpu)->left;
		counts.filtered += per_cpu_ptr(ml->counts, cpu)->filtered;
	}
	return copy_to_user(to, &counts, sizeof(counts)) ? -EFAULT : 0;
}
