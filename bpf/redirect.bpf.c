/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The least that a receiver on raw AF_XDP rings needs: UDP over IPv4 to one port
 * goes to the XSK of its queue. To measure against; see xdp.bpf.c for ours.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "manylane_abi.h"

/* Set before the program is loaded. */
const volatile __u16 ml_port;

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, ML_QUEUES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ml_raw SEC(".maps");

SEC("xdp")
int ml_redirect(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);

	if ((void *)(udp + 1) > (void *)(long)ctx->data_end ||
	    eth->h_proto != bpf_htons(ETH_P_IP) ||
	    ip->protocol != IPPROTO_UDP || ip->ihl != 5 ||
	    udp->dest != bpf_htons(ml_port))
		return XDP_PASS;
	return bpf_redirect_map(&ml_raw, ctx->rx_queue_index, XDP_PASS);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
