// SPDX-License-Identifier: GPL-2.0-only
/*
 * Receiving: what a program's calls find in place of UDP's functions.
 *
 *   1. error    of the socket
 *   2. base     the socket's own queue, by UDP's function: its datagrams are older,
 *               or need what only UDP can do
 *   3. take     from the queue of this processor, else from another
 *   4. copy     data, address and control messages, as udp_recvmsg() does
 *   5. sleep    if nothing was there; then again from 1
 *
 * Process context.
 */
#include <linux/in.h>
#include <linux/net.h>
#include <linux/poll.h>
#include <linux/sockios.h>
#include <asm/ioctls.h>
#include <net/ipv6.h>
#include <net/ping.h>
#include <net/udp.h>

#include "compat.h"
#include "manylane.h"

/* Stage 4, IPv4 */
static void copy_headers4(struct sock *sk, struct sk_buff *skb,
			  struct msghdr *msg, int *addr_len)
{
	struct sockaddr_in *name = msg->msg_name;

	if (name) {
		name->sin_family = AF_INET;
		name->sin_port = udp_hdr(skb)->source;
		name->sin_addr.s_addr = ip_hdr(skb)->saddr;
		memset(name->sin_zero, 0, sizeof(name->sin_zero));
		*addr_len = sizeof(*name);
		ml_run_recvmsg4(sk, (struct sockaddr *)name, addr_len);
	}
	if (udp_test_bit(GRO_ENABLED, sk))
		udp_cmsg_recv(msg, sk, skb);
	if (inet_cmsg_flags(inet_sk(sk)))
		ip_cmsg_recv_offset(msg, sk, skb, sizeof(struct udphdr), 0);
}

#if IS_ENABLED(CONFIG_IPV6)
/* Stage 4, IPv6 sockets, which may also have datagrams of IPv4 */
static void copy_headers6(struct sock *sk, struct sk_buff *skb,
			  struct msghdr *msg, int *addr_len)
{
	struct sockaddr_in6 *name = msg->msg_name;
	struct ipv6_pinfo *np = inet6_sk(sk);
	bool is_ipv4 = skb->protocol == htons(ETH_P_IP);

	if (name) {
		name->sin6_family = AF_INET6;
		name->sin6_port = udp_hdr(skb)->source;
		name->sin6_flowinfo = 0;
		if (is_ipv4) {
			ipv6_addr_set_v4mapped(ip_hdr(skb)->saddr,
					       &name->sin6_addr);
			name->sin6_scope_id = 0;
		} else {
			name->sin6_addr = ipv6_hdr(skb)->saddr;
			name->sin6_scope_id = ipv6_iface_scope_id(
				&name->sin6_addr, inet6_iif(skb));
		}
		*addr_len = sizeof(*name);
		ml_run_recvmsg6(sk, (struct sockaddr *)name, addr_len);
	}
	if (udp_test_bit(GRO_ENABLED, sk))
		udp_cmsg_recv(msg, sk, skb);
	/* These functions are exported for ping sockets, and only so. */
	if (np->rxopt.all)
		pingv6_ops.ip6_datagram_recv_common_ctl(sk, msg, skb);
	if (!is_ipv4 && np->rxopt.all)
		pingv6_ops.ip6_datagram_recv_specific_ctl(sk, msg, skb);
	if (is_ipv4 && inet_cmsg_flags(inet_sk(sk)))
		ip_cmsg_recv_offset(msg, sk, skb, sizeof(struct udphdr), 0);
}
#endif

/* Stage 4. The checksum was verified on arrival. */
static int copy(struct sock *sk, struct sk_buff *skb, struct msghdr *msg,
		size_t len, int flags, int *addr_len)
{
	int whole = skb->len, copied = min_t(size_t, len, whole);
	int err;

	if (copied < whole)
		msg->msg_flags |= MSG_TRUNC;
	err = skb_copy_datagram_msg(skb, 0, msg, copied);
	if (unlikely(err)) {
		/* The datagram is lost, as with UDP. */
		atomic_inc(&sk->sk_drops);
		kfree_skb(skb);
		return err;
	}
	/* SO_RXQ_OVFL: the drops of all queues until now. */
	SOCK_SKB_CB(skb)->dropcount = atomic_read(&sk->sk_drops);
	sock_recv_cmsgs(msg, sk, skb);
#if IS_ENABLED(CONFIG_IPV6)
	if (sk->sk_family == AF_INET6)
		copy_headers6(sk, skb, msg, addr_len);
	else
#endif
		copy_headers4(sk, skb, msg, addr_len);
	skb_consume_udp(sk, skb, copied);
	return flags & MSG_TRUNC ? whole : copied;
}

/* IPV6_RECVPATHMTU: such a message is no datagram, and no queue has it. */
static bool has_path_mtu(const struct sock *sk)
{
#if IS_ENABLED(CONFIG_IPV6)
	const struct ipv6_pinfo *np = inet6_sk(sk);

	return sk->sk_family == AF_INET6 && np->rxopt.bits.rxpmtu &&
	       READ_ONCE(np->rxpmtu);
#else
	return false;
#endif
}

/* Stages 1 to 4: -EAGAIN if there is nothing to receive. */
static int try_receive(struct ml_socket *ml, struct sock *sk,
		       struct msghdr *msg, size_t len, int flags, int *addr_len)
{
	struct sk_buff *skb;
	int err;

	for (;;) {
		err = sock_error(sk);
		if (err)
			return err;
		if (ml_base_readable(sk) || has_path_mtu(sk)) {
			err = ml->base_proto->recvmsg(
				sk, msg, len, flags | MSG_DONTWAIT, addr_len);
			if (err != -EAGAIN)
				return err;
		}
		if (!(flags & MSG_PEEK))
			break;
		/* The next receive, by whatever thread, gets what was peeked at. */
		if (!ml_move_to_base(ml, sk))
			return -EAGAIN;
	}
	skb = ml_take(ml);
	if (!skb)
		return -EAGAIN;
	return copy(sk, skb, msg, len, flags, addr_len);
}

int ml_recvmsg(struct sock *sk, struct msghdr *msg, size_t len, int flags,
	       int *addr_len)
{
	struct ml_socket *ml = ml_of(sk);
	long timeout;
	int err;

	if (unlikely(flags & MSG_ERRQUEUE))
		return ml->base_proto->recvmsg(sk, msg, len, flags, addr_len);
	timeout = sock_rcvtimeo(sk, flags & MSG_DONTWAIT);
	for (;;) {
		err = try_receive(ml, sk, msg, len, flags, addr_len);
		if (err != -EAGAIN || !timeout)
			return err;
		err = ml_sleep(ml, sk, &timeout);
		if (err)
			return err < 0 ? err : 0;
	}
}

/*
 * UDP's function enters the caller as a waiter, and has a full barrier after
 * that; ml_arrive() has one between queueing and looking for waiters.
 */
__poll_t ml_poll(struct file *file, struct socket *sock, poll_table *wait)
{
	struct ml_socket *ml = ml_of(sock->sk);
	__poll_t mask = ml->base_ops->poll(file, sock, wait);

	if (ml_readable(ml))
		mask |= EPOLLIN | EPOLLRDNORM;
	return mask;
}

int ml_ioctl(struct socket *sock, unsigned int cmd, unsigned long arg)
{
	struct ml_socket *ml = ml_of(sock->sk);

	switch (cmd) {
	case MANYLANE_REGISTER:
		return ml_headers_register(ml, (void __user *)arg);
	case MANYLANE_RECEIVE:
		return ml_headers_receive(sock, (void __user *)arg);
	case MANYLANE_COUNTS:
		return ml_copy_counts(ml, (void __user *)arg);
	case SIOCINQ:
		/* The length of the datagram that the next receive gets. */
		if (!ml_base_readable(sock->sk))
			ml_move_to_base(ml, sock->sk);
		break;
	}
	return ml->base_ops->ioctl(sock, cmd, arg);
}

int ml_setsockopt(struct sock *sk, int level, int name, sockptr_t value,
		  unsigned int len)
{
	/* They would replace our hook, or our operations, and leave the rest. */
	if (level == SOL_UDP && name == UDP_ENCAP)
		return -EBUSY;
	if (level == SOL_IPV6 && name == IPV6_ADDRFORM)
		return -EBUSY;
	return ml_of(sk)->base_proto->setsockopt(sk, level, name, value, len);
}
