// SPDX-License-Identifier: GPL-2.0-only
/*
 * Arrival: UDP has found the socket and verified the checksum, and calls
 * ml_arrive() in place of its own end of the path. Softirqs, under RCU.
 *
 *   1. leave    what only UDP can prepare, or what a reader of UDP's waits for, goes
 *               on to the socket's own queue
 *   2. filter   of the socket, cgroup and security module, as UDP runs it
 *   3. prepare  as UDP does: header off, packet information, route released
 *   4. pick     a queue, by policy
 *   5. queue    or drop, if the queue is full
 *   6. wake     one blocked reader, and whoever polls
 *
 * UDP owns the skb until stage 1 is over, this file until stage 5, then the
 * queue, and then the reader that took it out.
 */
#include <linux/filter.h>
#include <linux/jhash.h>
#include <net/busy_poll.h>
#include <net/ip.h>
#include <net/ipv6.h>
#include <net/route.h>
#include <net/udp.h>

#include "compat.h"
#include "manylane.h"

static bool is_ipv4(const struct sk_buff *skb)
{
	return skb->protocol == htons(ETH_P_IP);
}

/*
 * A thread that was in UDP's own receive when the socket was attached, and sleeps
 * there: an exclusive waiter with a task. Entries of poll and epoll are one or the
 * other at most.
 */
static bool has_blocked_stranger(struct sock *sk)
{
	struct socket_wq *wq = rcu_dereference(sk->sk_wq);
	struct wait_queue_entry *entry;
	unsigned long flags;
	bool found = false;

	if (!wq)
		return false;
	spin_lock_irqsave(&wq->wait.lock, flags);
	list_for_each_entry (entry, &wq->wait.head, entry)
		found |= (entry->flags & WQ_FLAG_EXCLUSIVE) && entry->private;
	spin_unlock_irqrestore(&wq->wait.lock, flags);
	return found;
}

/*
 * Stage 1. No queue wakes such a thread, so it gets its last datagram from UDP. It
 * may have been on its way to sleep when the socket was attached, or be again, when
 * another was faster: only for a second without one is there none.
 */
static bool leave_to_stranger(struct ml_socket *ml, struct sock *sk)
{
	if (likely(!READ_ONCE(ml->strangers)))
		return false;
	if (has_blocked_stranger(sk)) {
		WRITE_ONCE(ml->stranger_seen, jiffies);
		return true;
	}
	if (time_after(jiffies, READ_ONCE(ml->stranger_seen) + HZ))
		WRITE_ONCE(ml->strangers, false);
	return false;
}

/*
 * Stage 1. IP_PKTINFO has the address from which to answer. For datagrams to
 * this host it is their destination; for others, the routing tables are asked
 * by a function that is not exported.
 */
static bool leave(const struct sk_buff *skb)
{
	const struct rtable *route = skb_rtable(skb);
	const unsigned int kinds = RTCF_BROADCAST | RTCF_MULTICAST | RTCF_LOCAL;

	if (is_ipv4(skb))
		return !route || (route->rt_flags & kinds) != RTCF_LOCAL;
	return ipv6_addr_is_multicast(&ipv6_hdr(skb)->daddr);
}

/* Stage 3: ipv4_pktinfo_prepare(), where the answer of fib_compute_spec_dst() is known. */
static void prepare_pktinfo(const struct sock *sk, struct sk_buff *skb)
{
	struct in_pktinfo *info = PKTINFO_SKB_CB(skb);
	bool wanted = inet_cmsg_flags(inet_sk(sk)) & IP_CMSG_PKTINFO;

#if IS_ENABLED(CONFIG_IPV6)
	wanted |= sk->sk_family == AF_INET6 && inet6_sk(sk)->rxopt.bits.rxinfo;
#endif
	if (!wanted) {
		info->ipi_ifindex = 0;
		info->ipi_spec_dst.s_addr = 0;
		return;
	}
	/* The control block begins with the index of the device. */
	if (info->ipi_ifindex == LOOPBACK_IFINDEX)
		info->ipi_ifindex = inet_iif(skb);
	else if (ipv4_l3mdev_skb(IPCB(skb)->flags) && skb_rtable(skb)->rt_iif)
		info->ipi_ifindex = skb_rtable(skb)->rt_iif;
	info->ipi_spec_dst.s_addr = ip_hdr(skb)->daddr;
}

/* Stage 3 */
static void prepare(struct sock *sk, struct sk_buff *skb)
{
	udp_csum_pull_header(skb);
	if (is_ipv4(skb))
		prepare_pktinfo(sk, skb);
	skb_dst_drop(skb);

	if (sk->sk_state == TCP_ESTABLISHED) {
		sock_rps_save_rxhash(sk, skb);
		sk_mark_napi_id(sk, skb);
		sk_incoming_cpu_update(sk);
	} else {
		sk_mark_napi_id_once(sk, skb);
	}
}

static u32 hash_flow(const struct sk_buff *skb, u32 seed)
{
	const struct udphdr *udp = udp_hdr(skb);
	u32 ports = (__force u32)udp->source << 16 | (__force u32)udp->dest;

	if (is_ipv4(skb))
		return jhash_3words((__force u32)ip_hdr(skb)->saddr,
				    (__force u32)ip_hdr(skb)->daddr, ports,
				    seed);
	/* Source and destination are neighbours. */
	return jhash2((const u32 *)&ipv6_hdr(skb)->saddr, 8, seed ^ ports);
}

/* Stage 4 */
struct ml_queue *ml_pick(struct ml_socket *ml, const struct sk_buff *skb)
{
	u32 at;

	if (ml->policy == MANYLANE_FLOW)
		at = reciprocal_scale(hash_flow(skb, ml->seed), ml->count);
	else
		at = ((u32)atomic_inc_return(&ml->next) - 1) % ml->count;
	return &ml->queues[at];
}

/*
 * UDP counts as received whatever this hook takes: a drop takes that back, and
 * counts as it does itself.
 */
static void drop(struct sock *sk, struct sk_buff *skb, int why)
{
	struct udp_mib __percpu *mib = __UDPX_MIB(sk, is_ipv4(skb));

	SNMP_ADD_STATS(mib, UDP_MIB_INDATAGRAMS, -1);
	SNMP_INC_STATS(mib, UDP_MIB_INERRORS);
	if (why >= 0)
		SNMP_INC_STATS(mib, why);
	atomic_inc(&sk->sk_drops);
	kfree_skb(skb);
}

int ml_arrive(struct sock *sk, struct sk_buff *skb)
{
	struct ml_socket *ml = rcu_dereference_sk_user_data(sk);
	struct ml_queue *queue;
	int err;

	if (!ml)
		return 1;
	if (leave(skb) || leave_to_stranger(ml, sk)) {
		this_cpu_inc(ml->counts->left);
		return 1;
	}
	if (sk_filter_trim_cap(sk, skb, sizeof(struct udphdr))) {
		this_cpu_inc(ml->counts->filtered);
		drop(sk, skb, -1);
		return 0;
	}
	/* The flow is in the headers, which stay where they are. */
	queue = ml_pick(ml, skb);
	prepare(sk, skb);
	err = ml_queue_add(queue, sk, skb);
	if (err) {
		drop(sk, skb,
		     err == -ENOMEM ? UDP_MIB_RCVBUFERRORS : UDP_MIB_MEMERRORS);
		return 0;
	}
	/* As UDP: nobody waits for a socket that is being closed. */
	if (!sock_flag(sk, SOCK_DEAD)) {
		ml_wake_one(queue);
		ml->base_data_ready(sk);
	}
	return 0;
}
