/* SPDX-License-Identifier: GPL-2.0-only */
/* All that differs between Linux 6.1 and 6.12. */
#ifndef MANYLANE_COMPAT_H
#define MANYLANE_COMPAT_H

#include <linux/bpf-cgroup.h>
#include <linux/errqueue.h>
#include <linux/icmp.h>
#include <linux/version.h>
#include <net/inet_sock.h>
#include <net/ip.h>
#include <net/ipv6.h>
#include <net/udp.h>

/* Options of a socket became bits that are read without its lock. */
#ifndef inet_test_bit
#define inet_cmsg_flags(inet) ((inet)->cmsg_flags)
#define ml_recverr(sk) (inet_sk(sk)->recverr)
#define ml_recverr6(sk) (inet6_sk(sk)->recverr)
#else
#define ml_recverr(sk) inet_test_bit(RECVERR, sk)
#define ml_recverr6(sk) inet6_test_bit(RECVERR6, sk)
#endif

/* The length of the address became an argument of the programs of cgroups. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 7, 0)
#define ml_run_recvmsg4(sk, addr, len) \
	BPF_CGROUP_RUN_PROG_UDP4_RECVMSG_LOCK(sk, addr)
#define ml_run_recvmsg6(sk, addr, len) \
	BPF_CGROUP_RUN_PROG_UDP6_RECVMSG_LOCK(sk, addr)
#else
#define ml_run_recvmsg4(sk, addr, len) \
	BPF_CGROUP_RUN_PROG_UDP4_RECVMSG_LOCK(sk, addr, len)
#define ml_run_recvmsg6(sk, addr, len) \
	BPF_CGROUP_RUN_PROG_UDP6_RECVMSG_LOCK(sk, addr, len)
#endif

/*
 * encap_err_rcv() was given where the UDP header of the datagram in the ICMP
 * message is, and nothing else; now it is given what UDP derives from the
 * message. ip_icmp_error() was not exported.
 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define ML_ENCAP_ERR_OFFSET

static inline void ml_ip_icmp_error(struct sock *sk, struct sk_buff *skb,
				    int err, __be16 port, u32 info, u8 *payload)
{
	struct icmphdr *icmp = icmp_hdr(skb);
	struct iphdr *inner = (struct iphdr *)(icmp + 1);
	struct sock_exterr_skb *error;

	skb = skb_clone(skb, GFP_ATOMIC);
	if (!skb)
		return;
	error = SKB_EXT_ERR(skb);
	memset(&error->ee, 0, sizeof(error->ee));
	error->ee.ee_errno = err;
	error->ee.ee_origin = SO_EE_ORIGIN_ICMP;
	error->ee.ee_type = icmp->type;
	error->ee.ee_code = icmp->code;
	error->ee.ee_info = info;
	error->addr_offset = (u8 *)&inner->daddr - skb_network_header(skb);
	error->port = port;
	if (skb_pull(skb, payload - skb->data)) {
		skb_reset_transport_header(skb);
		if (!sock_queue_err_skb(sk, skb))
			return;
	}
	kfree_skb(skb);
}
#else
#define ml_ip_icmp_error ip_icmp_error
#endif

#endif
