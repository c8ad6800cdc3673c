// SPDX-License-Identifier: GPL-2.0-only
/*
 * Blocked readers sleep beside the queue of their processor; each datagram wakes
 * one of them, at its own queue if one sleeps there, else at any.
 *
 * No reader stays asleep while a datagram is queued, unless another reader is
 * already awake to take it:
 *
 *   - A reader enters itself, as asleep, then checks all queues, then sleeps, if it
 *     was not woken in between. A producer queues, then looks for readers. Each has
 *     a full barrier between its two steps, so at least one sees the other.
 *   - A producer takes the reader that it wakes off the list. So n datagrams wake
 *     n readers, if there are so many, and each tries to take one before it
 *     sleeps again or returns, also after a signal or at its timeout.
 */
#include <linux/sched/signal.h>
#include <net/udp.h>

#include "manylane.h"

/*
 * Under the lock also the state: a producer that took us off the list before the
 * state is set would wake us too early, and then nobody would know us asleep.
 */
static void lie_down(struct ml_sleeper *sleeper)
{
	struct ml_queue *queue = sleeper->queue;

	spin_lock_bh(&queue->sleep_lock);
	list_add_tail(&sleeper->node, &queue->asleep);
	atomic_inc(&queue->owner->asleep);
	/* Has the full barrier between entering and checking. */
	set_current_state(TASK_INTERRUPTIBLE);
	spin_unlock_bh(&queue->sleep_lock);
}

/* The lock of the queue is held. */
static void get_up(struct ml_sleeper *sleeper)
{
	list_del_init(&sleeper->node);
	atomic_dec(&sleeper->queue->owner->asleep);
}

/*
 * With the lock of the readers: without it, datagrams on their way from UDP's
 * list of arrivals to that of its readers could be in neither.
 */
static bool is_base_readable(struct sock *sk)
{
	struct sk_buff_head *readers = &udp_sk(sk)->reader_queue;
	bool found;

	spin_lock_bh(&readers->lock);
	found = ml_base_readable(sk);
	spin_unlock_bh(&readers->lock);
	return found;
}

/*
 * Without a lock: the memory of a datagram is charged before it is in a list, and
 * until its reader has taken it out. A moment too long makes us try again.
 */
static bool is_readable(const struct ml_queue *queue)
{
	return sk_rmem_alloc_get(queue->sock->sk);
}

static bool any_readable(struct ml_socket *ml, struct sock *sk)
{
	u32 i;

	for (i = 0; i < ml->count; i++)
		if (is_readable(&ml->queues[i]))
			return true;
	return is_base_readable(sk);
}

/*
 * Returns 0 when the caller should try again, 1 if the socket was shut down, or an
 * error. Process context.
 */
int ml_sleep(struct ml_socket *ml, struct sock *sk, long *timeout)
{
	struct ml_sleeper me = { .task = current, .queue = ml_own_queue(ml) };
	int result = 0;

	lie_down(&me);
	if (any_readable(ml, sk) || READ_ONCE(sk->sk_err))
		;
	else if (READ_ONCE(sk->sk_shutdown) & RCV_SHUTDOWN)
		result = 1;
	else if (signal_pending(current))
		result = sock_intr_errno(*timeout);
	else
		*timeout = schedule_timeout(*timeout);
	__set_current_state(TASK_RUNNING);

	/* A producer that wakes us holds the lock: after this, none knows us. */
	spin_lock_bh(&me.queue->sleep_lock);
	if (!list_empty(&me.node))
		get_up(&me);
	else
		/* Woken for a datagram: try, whatever else has happened. */
		result = 0;
	spin_unlock_bh(&me.queue->sleep_lock);
	return result;
}

static bool wake_at(struct ml_queue *queue, bool all)
{
	struct ml_sleeper *sleeper, *next;
	bool found = false;

	if (list_empty_careful(&queue->asleep))
		return false;
	spin_lock_bh(&queue->sleep_lock);
	list_for_each_entry_safe (sleeper, next, &queue->asleep, node) {
		get_up(sleeper);
		wake_up_process(sleeper->task);
		found = true;
		if (!all)
			break;
	}
	spin_unlock_bh(&queue->sleep_lock);
	return found;
}

/* After a datagram was queued. Softirqs or process context. */
void ml_wake_one(struct ml_queue *first)
{
	struct ml_socket *ml = first->owner;
	struct ml_queue *queue = first, *end = ml->queues + ml->count;

	/* Between queueing and looking: pairs with set_current_state() of lie_down(). */
	smp_mb();
	if (!atomic_read(&ml->asleep))
		return;
	do {
		if (wake_at(queue, false))
			return;
		if (++queue == end)
			queue = ml->queues;
	} while (queue != first);
}

/* After an error or shutdown(). Softirqs or process context. */
void ml_wake_all(struct ml_socket *ml)
{
	u32 i;

	smp_mb();
	for (i = 0; i < ml->count; i++)
		wake_at(&ml->queues[i], true);
}
