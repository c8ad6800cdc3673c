// SPDX-License-Identifier: GPL-2.0-only
/*
 * What the module tests when it is loaded, if it was built with SELFTEST=1, before
 * any socket can be attached: that the policies distribute, and that each datagram
 * is in a queue, was taken or was dropped, once. Process context.
 */
#include <linux/ip.h>
#include <linux/skbuff.h>
#include <net/udp.h>

#include "manylane.h"

#define QUEUES 7
#define ROUNDS 40

#define expect(condition)                                                      \
	do {                                                                   \
		if (!(condition)) {                                            \
			pr_err("manylane: self-test, line %d: %s\n", __LINE__, \
			       #condition);                                    \
			err = -EPROTO;                                         \
			goto out;                                              \
		}                                                              \
	} while (0)

/* A datagram of flow "port"; its data is empty. */
static struct sk_buff *make_datagram(u16 port)
{
	struct sk_buff *skb;

	skb = alloc_skb(sizeof(struct iphdr) + sizeof(struct udphdr),
			GFP_KERNEL);
	if (!skb)
		return NULL;
	skb->protocol = htons(ETH_P_IP);
	skb_reset_network_header(skb);
	skb_put_zero(skb, sizeof(struct iphdr));
	skb_set_transport_header(skb, sizeof(struct iphdr));
	skb_put_zero(skb, sizeof(struct udphdr));
	ip_hdr(skb)->saddr = htonl(INADDR_LOOPBACK);
	ip_hdr(skb)->daddr = htonl(INADDR_LOOPBACK);
	udp_hdr(skb)->source = htons(port);
	skb_pull(skb, sizeof(struct iphdr) + sizeof(struct udphdr));
	return skb;
}

static int add(struct ml_queue *queue, struct sock *sk, struct sk_buff *skb)
{
	int err;

	local_bh_disable();
	err = ml_queue_add(queue, sk, skb);
	local_bh_enable();
	if (err)
		kfree_skb(skb);
	return err;
}

static int test_policies(void)
{
	struct ml_socket *robin =
		ml_socket_create(&init_net, MANYLANE_ROUND_ROBIN, QUEUES);
	struct ml_socket *flow =
		ml_socket_create(&init_net, MANYLANE_FLOW, QUEUES);
	struct sk_buff *skb = NULL;
	bool used[QUEUES] = {};
	int i, n = 0, err = -ENOMEM;

	if (IS_ERR(robin) || IS_ERR(flow))
		goto out;
	for (i = 0; i < QUEUES * ROUNDS; i++) {
		skb = make_datagram(i);
		if (!skb)
			goto out;
		expect(ml_pick(robin, skb) == &robin->queues[i % QUEUES]);
		expect(ml_pick(flow, skb) == ml_pick(flow, skb));
		used[ml_pick(flow, skb) - flow->queues] = true;
		kfree_skb(skb);
		skb = NULL;
	}
	for (i = 0; i < QUEUES; i++)
		n += used[i];
	/* The chance that 280 flows leave one of 7 queues empty is below 1e-17. */
	expect(n == QUEUES);
	err = 0;
out:
	kfree_skb(skb);
	if (!IS_ERR(robin))
		ml_socket_free(robin);
	if (!IS_ERR(flow))
		ml_socket_free(flow);
	return err;
}

static int test_queues(struct sock *sk)
{
	struct ml_socket *ml =
		ml_socket_create(&init_net, MANYLANE_ROUND_ROBIN, QUEUES);
	int i, taken = 0, full = 0, err = -ENOMEM;
	struct sk_buff *skb;

	if (IS_ERR(ml))
		return PTR_ERR(ml);
	expect(!ml_readable(ml));
	sk->sk_rcvbuf = SOCK_MIN_RCVBUF;
	for (i = 0; i < QUEUES * ROUNDS; i++) {
		skb = make_datagram(i);
		if (!skb)
			goto out;
		err = add(ml_pick(ml, skb), sk, skb);
		expect(!err || err == -ENOMEM);
		full += !!err;
	}
	expect(full && full < i && ml_readable(ml));
	expect(ml_move_to_base(ml, sk) && ml_base_readable(sk));
	while ((skb = ml_take(ml))) {
		kfree_skb(skb);
		taken++;
	}
	expect(!ml_readable(ml));
	expect(taken + full + 1 == i);
	/* An empty queue always has room for one. */
	sk->sk_rcvbuf = 1;
	skb = make_datagram(0);
	expect(skb && !add(&ml->queues[QUEUES - 1], sk, skb));
	/* It is freed with its queue. */
	expect(ml_readable(ml));
	err = 0;
out:
	ml_socket_free(ml);
	return err;
}

int ml_selftest(void)
{
	struct socket *sock;
	int err;

	err = test_policies();
	if (err)
		return err;
	err = sock_create_kern(&init_net, AF_INET, SOCK_DGRAM, IPPROTO_UDP,
			       &sock);
	if (err)
		return err;
	err = test_queues(sock->sk);
	sock_release(sock);
	if (!err)
		pr_info("manylane: self-test passed\n");
	return err;
}
