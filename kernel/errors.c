// SPDX-License-Identifier: GPL-2.0-only
/*
 * ICMP errors. UDP takes a socket with our hook for a tunnel, and gives errors
 * not to the socket but to the tunnel's handler: this one, which does with them
 * what UDP does for other sockets. Softirqs, under RCU.
 */
#include <linux/icmpv6.h>
#include <net/icmp.h>
#include <net/ping.h>

#include "compat.h"
#include "manylane.h"

/* The error of the message, and whether it is fatal for connected sockets. */
static int to_errno4(const struct sk_buff *skb, bool *fatal)
{
	const struct icmphdr *icmp = icmp_hdr(skb);

	*fatal = false;
	if (icmp->type == ICMP_PARAMETERPROB) {
		*fatal = true;
		return EPROTO;
	}
	if (icmp->type == ICMP_DEST_UNREACH && icmp->code == ICMP_FRAG_NEEDED) {
		*fatal = true;
		return EMSGSIZE;
	}
	if (icmp->type == ICMP_DEST_UNREACH && icmp->code <= NR_ICMP_UNREACH) {
		*fatal = icmp_err_convert[icmp->code].fatal;
		return icmp_err_convert[icmp->code].errno;
	}
	return EHOSTUNREACH;
}

static int to_errno6(const struct sock *sk, const struct sk_buff *skb,
		     bool *fatal)
{
	const struct icmp6hdr *icmp = icmp6_hdr(skb);
	int err;

	*fatal = icmpv6_err_convert(icmp->icmp6_type, icmp->icmp6_code, &err);
	if (icmp->icmp6_type == ICMPV6_PKT_TOOBIG &&
	    inet6_sk(sk)->pmtudisc != IPV6_PMTUDISC_DONT)
		*fatal = true;
	return err;
}

static void report(struct sock *sk, struct sk_buff *skb, __be16 port, u32 info,
		   u8 *payload)
{
	bool queued = false, fatal;
	int err;

	if (skb->protocol == htons(ETH_P_IP)) {
		err = to_errno4(skb, &fatal);
		if (ml_recverr(sk)) {
			ml_ip_icmp_error(sk, skb, err, port, info, payload);
			queued = true;
		}
	} else {
		err = to_errno6(sk, skb, &fatal);
		if (ml_recverr6(sk)) {
			pingv6_ops.ipv6_icmp_error(sk, skb, err, port, info,
						   payload);
			queued = true;
		}
	}
	if (!queued && (!fatal || sk->sk_state != TCP_ESTABLISHED))
		return;
	WRITE_ONCE(sk->sk_err, err);
	sk_error_report(sk);
}

#ifdef ML_ENCAP_ERR_OFFSET
static void handle_error(struct sock *sk, struct sk_buff *skb,
			 unsigned int udp_offset)
{
	struct udphdr *udp = (struct udphdr *)(skb->data + udp_offset);
	u32 info = 0;

	if (skb->protocol != htons(ETH_P_IP))
		info = ntohl(icmp6_hdr(skb)->icmp6_mtu);
	else if (icmp_hdr(skb)->type == ICMP_PARAMETERPROB)
		info = ntohl(icmp_hdr(skb)->un.gateway) >> 24;
	else if (icmp_hdr(skb)->code == ICMP_FRAG_NEEDED)
		info = ntohs(icmp_hdr(skb)->un.frag.mtu);
	report(sk, skb, udp->dest, info, (u8 *)(udp + 1));
}
#else
static void handle_error(struct sock *sk, struct sk_buff *skb, int err,
			 __be16 port, u32 info, u8 *payload)
{
	report(sk, skb, port, info, payload);
}
#endif

void ml_set_error_handler(struct sock *sk)
{
	udp_sk(sk)->encap_err_rcv = handle_error;
}
