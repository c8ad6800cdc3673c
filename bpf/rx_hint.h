/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Stage 9 of the XDP program: the hint on a frame that is redirected to a lane.
 * Lengths and checksums are verified here, where the headers are in the cache,
 * and not by the lane, which runs on another CPU and would have to read them
 * again.
 *
 * The hint overwrites the first bytes of the destination's address, which is
 * the device's own (stage 1): it needs no support by the driver, lies in the
 * cache line that a lane reads anyway, and cannot be forged, because a frame to
 * a group address does not get this far.
 *
 * Only plain and short datagrams without errors get one. For other frames the
 * lane reads the headers, and counts what is invalid.
 */
#ifndef MANYLANE_RX_HINT_H
#define MANYLANE_RX_HINT_H

/* Adds words to a sum of the Internet checksum, in the machine's byte order. */
static __always_inline __u64 add(__u64 sum, const __u32 *words, int count)
{
	int i;

#pragma unroll
	for (i = 0; i < count; i++)
		sum += words[i];
	return sum;
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* 9a: the sum of the pseudo header, if IP says what UDP says; else 0. */
static __always_inline __u64 check_ip4(const struct iphdr *ip,
				       const struct udphdr *udp, __u32 length)
{
	__u64 addresses = add(0, &ip->saddr, 2);

	if (bpf_ntohs(ip->tot_len) != sizeof(*ip) + length ||
	    fold(add(addresses, (const __u32 *)ip, 3)) != 0xffff)
		return 0;
	return addresses + bpf_htons(IPPROTO_UDP) + udp->len;
}

static __always_inline __u64 check_ip6(const struct ipv6hdr *ip,
				       const struct udphdr *udp, __u32 length)
{
	/* No sum is none over IPv6, and ::/8 has addresses that are none. */
	if (bpf_ntohs(ip->payload_len) != length || !udp->check ||
	    !ip->daddr.s6_addr[0])
		return 0;
	return add(0, ip->saddr.s6_addr32, 8) + bpf_htons(IPPROTO_UDP) +
	       udp->len;
}

/*
 * 9b: adds the datagram; 0 if not all of it is there. Its end comes first: then
 * the verifier sees that all ways out of the loop are one.
 */
static __always_inline __u64 add_datagram(__u64 sum, const struct udphdr *udp,
					  const void *end, __u32 length)
{
	const __u32 *word = (const void *)udp;
	/* No more than ML_RX_HINT_UDP_MAX, and a bound that the verifier sees. */
	const void *rest = (const void *)udp + (length & 0x78);
	__u32 i;

	if (length & 4) {
		const __u32 *whole = rest;

		if ((const void *)(whole + 1) > end)
			return 0;
		sum += *whole;
		rest = whole + 1;
	}
	if (length & 2) {
		const __u16 *half = rest;

		if ((const void *)(half + 1) > end)
			return 0;
		sum += *half;
		rest = half + 1;
	}
	if (length & 1) {
		const __u8 *byte = rest;

		if ((const void *)(byte + 1) > end)
			return 0;
		/* The first byte of a word, of which the rest is zero. */
		sum += bpf_htons(*byte << 8);
	}
	length /= 8;
	for (i = 0; i < ML_RX_HINT_UDP_MAX / 8; i++) {
		if (i == length)
			break;
		/* Compared as it is: the verifier takes no sum with the end. */
		barrier_var(word);
		if ((const void *)(word + 2) > end)
			return 0;
		sum = add(sum, word, 2);
		word += 2;
	}
	return sum;
}

/*
 * 9c: all of it. Not inlined: the verifier looks at a function of its own once,
 * and not again for each way that leads to it.
 */
__attribute__((noinline)) int ml_write_rx_hint(struct xdp_md *ctx)
{
	struct ethhdr *eth = (void *)(long)ctx->data;
	const void *end = (void *)(long)ctx->data_end;
	struct ml_rx_hint *about = (struct ml_rx_hint *)eth;
	const struct iphdr *ip4 = (const void *)(eth + 1);
	const struct ipv6hdr *ip6 = (const void *)(eth + 1);
	const struct udphdr *udp;
	__u8 kind = ML_RX_HINT | ML_RX_HINT_V4;
	__u64 pseudo;
	__u64 sum;
	__u32 length;

	if ((const void *)(ip4 + 1) > end)
		return 0;
	/* A type behind tags is not in this place. */
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		udp = (const void *)(ip4 + 1);
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
		udp = (const void *)(ip6 + 1);
		kind |= ML_RX_HINT_V6;
	} else {
		return 0;
	}
	if ((const void *)(udp + 1) > end)
		return 0;
	length = bpf_ntohs(udp->len);
	if (length < sizeof(*udp) || length > ML_RX_HINT_UDP_MAX)
		return 0;
	pseudo = kind == (ML_RX_HINT | ML_RX_HINT_V6) ?
			 check_ip6(ip6, udp, length) :
			 check_ip4(ip4, udp, length);
	if (!pseudo)
		return 0;
	sum = add_datagram(pseudo, udp, end, length);
	if (!sum)
		return 0;
	if (udp->check && fold(sum) != 0xffff) {
		/* A kernel on this machine left the rest to a device. */
		if (fold(pseudo) != udp->check)
			return 0;
		kind |= ML_RX_HINT_PARTIAL;
	}
	about->kind = kind;
	about->bytes = length - sizeof(*udp);
	return 1;
}

#endif /* MANYLANE_RX_HINT_H */
