/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The XDP program of one device: redirects UDP datagrams and TCP segments to a
 * bound address to the XSK of their queue, and passes everything else to the
 * kernel.
 *
 * It decides by headers alone, and drops only what the socket's filter rejects
 * (filter.h), and segments that no lane can receive: the kernel does not have
 * their connection, and would reset it. Frames that it cannot parse are passed:
 * the lane's companion socket receives them from the kernel. A hint on a
 * redirected datagram tells that lengths and checksums are valid (rx_hint.h).
 * The lane verifies frames without a hint, and counts invalid ones.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "manylane_abi.h"
#include "filter.h"
#include "rx_hint.h"

/* Set where a checksum may be partial: see is_partial. */
const volatile __u8 ml_may_be_partial;

#define IP_FRAGMENT 0x3fff /* more fragments, or an offset */
#define VLAN_ID 0x0fff
#define PORT_BLOCK_MASK bpf_htons((__u16) ~(ML_PORT_BLOCK - 1))

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ml_device);
} ml_device SEC(".maps");

/* Bound address, protocol and port to the number of the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct ml_port);
	__type(value, __u32);
} ml_ports SEC(".maps");

/* Our own addresses: frames with such a source address are passed. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct ml_addr);
	__type(value, __u32);
} ml_locals SEC(".maps");

/*
 * Accepted VLANs: the outer number shifted by 16, and the inner one, to a mask
 * of the sockets that accept them.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} ml_vlans SEC(".maps");

/* Number of the socket times ML_QUEUES_MAX plus queue to the XSK. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, ML_SOCKETS_MAX *ML_QUEUES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ml_xsks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ML_XDP_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} ml_xdp_counts SEC(".maps");

struct vlan_tag {
	__be16 control;
	__be16 type;
};

static __always_inline int verdict(__u32 reason, int action)
{
	__u64 *count = bpf_map_lookup_elem(&ml_xdp_counts, &reason);

	if (count)
		(*count)++;
	return action;
}

static __always_inline int pass(__u32 reason)
{
	return verdict(reason, XDP_PASS);
}

/* The action for what is ours, but no lane can receive. */
static __always_inline int unreceived(const struct ml_port *to)
{
	return to->protocol == IPPROTO_TCP ? XDP_DROP : XDP_PASS;
}

/* 1: to the device's own address; other frames of promiscuous mode are passed. */
static __always_inline int is_to_device(const struct ethhdr *eth,
					const struct ml_device *device)
{
	const __u16 *to = (const __u16 *)eth->h_dest;
	const __u16 *ours = (const __u16 *)device->mac;

	return to[0] == ours[0] && to[1] == ours[1] && to[2] == ours[2];
}

/*
 * 2: up to two tags. Returns the type of the next header, 0 for a frame to
 * pass; sets the mask of sockets that may receive it.
 */
static __always_inline __be16 skip_tags(void **at, void *end, __be16 type,
					__u32 *sockets)
{
	const __be16 outer = type;
	__u32 vlans = 0;
	__u32 *taken;
	int tags;

#pragma unroll
	for (tags = 0; tags < 2; tags++) {
		struct vlan_tag *tag = *at;

		if (type != bpf_htons(ETH_P_8021Q) &&
		    type != bpf_htons(ETH_P_8021AD))
			break;
		if ((void *)(tag + 1) > end)
			return 0;
		vlans = vlans << 16 | (bpf_ntohs(tag->control) & VLAN_ID);
		type = tag->type;
		*at = tag + 1;
	}
	/* Number 0 is a priority without a VLAN. */
	if (!vlans)
		return type;
	/* The number of a service tag alone is not that of a VLAN. */
	if (tags == 1 && outer == bpf_htons(ETH_P_8021AD))
		return 0;
	taken = bpf_map_lookup_elem(&ml_vlans, &vlans);
	if (!taken)
		return 0;
	*sockets = *taken;
	return type;
}

static __always_inline void map_ip4(struct ml_addr *addr, __be32 ip)
{
	__u32 *words = (__u32 *)addr->ip;

	words[0] = 0;
	words[1] = 0;
	words[2] = bpf_htonl(0xffff);
	words[3] = ip;
}

static __always_inline int is_taken(const struct ml_device *device,
				    __u8 protocol)
{
	return protocol == IPPROTO_UDP ||
	       (protocol == IPPROTO_TCP && device->takes_tcp);
}

/*
 * 3: addresses and protocol, if the packet is a plain UDP datagram or TCP
 * segment; else why it is not.
 */
static __always_inline int read_ip4(const struct ml_device *device, void **at,
				    void *end, struct ml_addr *from,
				    struct ml_port *to)
{
	struct iphdr *ip = *at;
	__u32 source;

	if ((void *)(ip + 1) > end || ip->version != 4 ||
	    !is_taken(device, ip->protocol))
		return ML_XDP_NOT_UDP;
	if (ip->ihl != 5 || (ip->frag_off & bpf_htons(IP_FRAGMENT)))
		return ML_XDP_FRAGMENT_OR_OPTIONS;
	source = bpf_ntohl(ip->saddr);
	/* This network, loopback, multicast, reserved, broadcast. */
	if (source >> 24 == 0 || source >> 24 == 127 || source >> 28 >= 14)
		return ML_XDP_BAD_SOURCE;
	map_ip4(from, ip->saddr);
	map_ip4(&to->addr, ip->daddr);
	to->protocol = ip->protocol;
	*at = ip + 1;
	return 0;
}

static __always_inline int read_ip6(const struct ml_device *device, void **at,
				    void *end, struct ml_addr *from,
				    struct ml_port *to)
{
	struct ipv6hdr *ip = *at;

	if ((void *)(ip + 1) > end || ip->version != 6)
		return ML_XDP_NOT_UDP;
	if (!is_taken(device, ip->nexthdr)) {
		/* The kernel parses extension headers, which UDP may follow. */
		return ip->nexthdr == IPPROTO_TCP ||
				       ip->nexthdr == IPPROTO_ICMPV6 ?
			       ML_XDP_NOT_UDP :
			       ML_XDP_FRAGMENT_OR_OPTIONS;
	}
	/*
	 * Link-local (only the kernel knows the link) and multicast, fe00::/7,
	 * and ::/8 with unspecified, loopback, mapped addresses: in one
	 * comparison.
	 */
	if ((__u8)(ip->saddr.s6_addr[0] + 2) <= 2)
		return ML_XDP_BAD_SOURCE;
	__builtin_memcpy(from->ip, &ip->saddr, sizeof(from->ip));
	__builtin_memcpy(to->addr.ip, &ip->daddr, sizeof(to->addr.ip));
	to->protocol = ip->nexthdr;
	*at = ip + 1;
	return 0;
}

/*
 * Whether a source is one of our own addresses. Most are not even in the Bloom
 * filter, which saves a lookup.
 */
static __always_inline int is_local(const struct ml_device *device,
				    const struct ml_addr *from)
{
	const __u32 *ip = (const __u32 *)from->ip;
	__u32 bit = (ip[0] ^ ip[1] ^ ip[2] ^ ip[3]) * ML_LOCAL_FACTOR >> 24;

	return device->locals[bit / 64] >> bit % 64 & 1 &&
	       bpf_map_lookup_elem(&ml_locals, from);
}

/* 4: the socket, unless the source cannot be answered. */
static __always_inline int find_socket(const struct ml_device *device,
				       struct ml_port *to,
				       const struct ml_addr *from,
				       __u32 sockets, __u32 *number)
{
	__u32 *socket = bpf_map_lookup_elem(&ml_ports, to);

	if (!socket && to->protocol == IPPROTO_TCP) {
		to->port &= PORT_BLOCK_MASK;
		to->is_block = 1;
		socket = bpf_map_lookup_elem(&ml_ports, to);
	}
	if (!socket || *socket >= ML_SOCKETS_MAX)
		return ML_XDP_NO_PORT;
	if (!(sockets >> *socket & 1))
		return ML_XDP_OTHER_VLAN;
	if (is_local(device, from))
		return ML_XDP_BAD_SOURCE;
	*number = *socket;
	return 0;
}

/*
 * 6: a frame from a kernel on this machine can be a GSO message (many datagrams
 * behind one header) that a device was to segment. The program cannot see that,
 * but the checksum is partial: the sum of the pseudo header alone. So is the
 * finished checksum of one frame in 65,535, which is passed, too: verifying it
 * would accept one in as many GSO messages as a datagram. Not so for TCP: there
 * a GSO message is a longer segment, which a lane can receive.
 */
static __always_inline int is_partial(const struct ml_addr *from,
				      const struct ml_addr *to,
				      const struct udphdr *udp)
{
	const __u16 *one = (const __u16 *)from->ip;
	const __u16 *two = (const __u16 *)to->ip;
	__u32 sum = bpf_htons(IPPROTO_UDP) + udp->len;
	int i;

	if (!ml_may_be_partial)
		return 0;
		/* The ffff of a mapped address adds nothing. */
#pragma unroll
	for (i = 0; i < 8; i++)
		sum += one[i] + two[i];
	return udp->check && sum % 0xffff == udp->check % 0xffff;
}

static __always_inline int take(struct xdp_md *ctx, __u64 length)
{
	void *at = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	const __u32 zero = 0;
	struct ml_device *device = bpf_map_lookup_elem(&ml_device, &zero);
	struct ethhdr *eth = at;
	struct ml_addr from;
	struct ml_port to = {};
	struct udphdr *udp;
	__u32 sockets = ~0U;
	__be16 type;
	__u32 socket;
	__u32 index;
	int reason;

	if (!device || (void *)(eth + 1) > end)
		return pass(ML_XDP_NOT_UDP);
	if (!is_to_device(eth, device))
		return pass(ML_XDP_OTHER_MAC);
	at = eth + 1;
	type = skip_tags(&at, end, eth->h_proto, &sockets);
	if (!type)
		return pass(ML_XDP_OTHER_VLAN);
	if (type == bpf_htons(ETH_P_IP))
		reason = read_ip4(device, &at, end, &from, &to);
	else if (type == bpf_htons(ETH_P_IPV6))
		reason = read_ip6(device, &at, end, &from, &to);
	else
		reason = ML_XDP_NOT_UDP;
	if (reason)
		return pass(reason);
	/* The ports of TCP are in the same place. */
	udp = at;
	if ((void *)(udp + 1) > end)
		return pass(ML_XDP_NOT_UDP);
	to.port = udp->dest;
	reason = find_socket(device, &to, &from, sockets, &socket);
	if (reason)
		return pass(reason);
	/* 5: drop what the socket's filter rejects. */
	reason = check_filter(socket, type == bpf_htons(ETH_P_IPV6), &from);
	if (reason)
		return verdict(reason, XDP_DROP);
	if (to.protocol == IPPROTO_UDP && is_partial(&from, &to.addr, udp))
		return pass(ML_XDP_PARTIAL_CHECKSUM);
	/* 7: an XSK would drop packets longer than its frames. */
	if (length > device->longest)
		return verdict(ML_XDP_TOO_LONG, unreceived(&to));
	/* 8: to the lane of this queue; if there is none, to the kernel. */
	index = socket * ML_QUEUES_MAX + ctx->rx_queue_index;
	if (ctx->rx_queue_index >= ML_QUEUES_MAX ||
	    bpf_redirect_map(&ml_xsks, index, XDP_PASS) != XDP_REDIRECT)
		return verdict(ML_XDP_NO_LANE, unreceived(&to));
	/* 9: the hint, which saves the lane the verification. */
	if (to.protocol == IPPROTO_UDP)
		ml_write_rx_hint(ctx);
	return verdict(ML_XDP_REDIRECTED, XDP_REDIRECT);
}

/* For devices whose frames may be in several pieces (Linux 5.18). */
SEC("xdp.frags")
int ml_take_pieces(struct xdp_md *ctx)
{
	return take(ctx, bpf_xdp_get_buff_len(ctx));
}

SEC("xdp")
int ml_take(struct xdp_md *ctx)
{
	return take(ctx, ctx->data_end - ctx->data);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
