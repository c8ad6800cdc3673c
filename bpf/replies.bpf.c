/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Counts the replies that come back to a host whose requests were made by
 * generator.bpf.c, and drops them: no socket is waiting for them, and the kernel
 * would tell the server so by ICMP. Everything else, such as ARP, is the
 * kernel's.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stddef.h>

/* Set before the program is loaded. */
const volatile __u16 ml_port; /* of the server */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} ml_replies SEC(".maps");

/* The UDP header, if it follows that of IP at once; else a null pointer. */
static __always_inline struct udphdr *find_udp(struct ethhdr *eth, void *end)
{
	struct ipv6hdr *ip6 = (void *)(eth + 1);
	struct iphdr *ip4 = (void *)(eth + 1);

	if ((void *)(ip4 + 1) > end)
		return NULL;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return ip4->ihl == 5 && ip4->protocol == IPPROTO_UDP ?
			       (void *)(ip4 + 1) :
			       NULL;
	if (eth->h_proto != bpf_htons(ETH_P_IPV6) || (void *)(ip6 + 1) > end)
		return NULL;
	return ip6->nexthdr == IPPROTO_UDP ? (void *)(ip6 + 1) : NULL;
}

/* Counts the frame if it is a reply. Returns 1 if so. */
static __always_inline int is_reply(void *data, void *end)
{
	struct udphdr *udp;
	const __u32 zero = 0;
	__u64 *count;

	if (data + sizeof(struct ethhdr) > end)
		return 0;
	udp = find_udp(data, end);
	if (!udp || (void *)(udp + 1) > end ||
	    udp->source != bpf_htons(ml_port))
		return 0;
	count = bpf_map_lookup_elem(&ml_replies, &zero);
	if (count)
		(*count)++;
	return 1;
}

/* In the driver. */
SEC("xdp")
int ml_count_replies(struct xdp_md *ctx)
{
	return is_reply((void *)(long)ctx->data, (void *)(long)ctx->data_end) ?
		       XDP_DROP :
		       XDP_PASS;
}

/*
 * Where the stack begins: a virtual device hands over what another kernel has
 * made as it is, where a program in the driver has it copied first.
 */
SEC("classifier")
int ml_count_in_stack(struct __sk_buff *skb)
{
	return is_reply((void *)(long)skb->data, (void *)(long)skb->data_end) ?
		       TC_ACT_SHOT :
		       TC_ACT_OK;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
