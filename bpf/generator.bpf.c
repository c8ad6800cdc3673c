/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The traffic generator: turns each frame that BPF_PROG_TEST_RUN hands it (live
 * frames) into the next UDP datagram, or a SYN of TCP, and sends it out of a
 * device, or of several devices in turn.
 *
 * The kernel recycles the pages of frames without writing the frame into them
 * again, and a receiver may have changed them meanwhile: all headers are written
 * each time. The payload is left as it is.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ETHERNET 14
#define UDP 8
#define TCP 20
#define HEAD4 (ETHERNET + 20 + UDP)
#define HEAD6 (ETHERNET + 40 + UDP)
#define HEAD_SYN (ETHERNET + 20 + TCP)

/* Set before the program is loaded. */
const volatile __u32 ways = 1;	 /* number of devices to send from */
const volatile __u32 flows = 1;	 /* number of source ports */
const volatile __u16 first_port; /* the first one; no overflow */
const volatile __u8 ipv6;
const volatile __u8 syn;	    /* SYNs with random ports, IPv4 */
const volatile __u32 random_source; /* bits of the source to choose, IPv4 */

#define WAYS_MAX 64

/* A device, and the headers of what leaves by it. */
struct ml_way {
	__u32 device;  /* its index */
	__u16 partial; /* checksum's sum with source port 0 */
	__u16 pad;
	/*
	 * Ethernet, IP and UDP header; source port and checksum are blank. With
	 * `syn`, TCP's: its number and the source address are blank, too.
	 */
	__u8 head[64];
};
_Static_assert(sizeof(struct ml_way) == 9 * 8, "as traffic/live.rs has it");
_Static_assert(__builtin_offsetof(struct ml_way, head) == 8, "as above");

/*
 * One entry, in 64-bit words. User space writes the settings and reads results
 * between two runs. Only one thread runs the program of one object at a time, so
 * it needs no atomics.
 *
 * The rate is kept here and not in user space: each BPF_PROG_TEST_RUN ends with
 * RCU grace periods, so that one call has to last for a whole run. A frame that
 * is not due yet is dropped, which is cheap.
 */
struct ml_generator {
	/* Settings. */
	__u64 limit;	/* frames to make, UINT64_MAX for no limit */
	__u64 duration; /* ns from the first frame, UINT64_MAX as above */
	__u64 interval; /* between two frames, in 1/256 ns; 0 for no limit */
	/* Results. */
	__u64 frames; /* made */
	__u64 first;  /* when the first one was, in ns; 0 before */
	__u64 last;   /* when the last one was */
	__u64 late;   /* the most that one was behind its time, in ns */
	/* Our own. */
	__u64 next; /* when the next one is due, in 1/256 ns */
	__u64 flow; /* of the next frame */
	__u64 way;  /* of the next frame */
};
_Static_assert(sizeof(struct ml_generator) == 10 * 8,
	       "as traffic/live.rs has it");
_Static_assert(__builtin_offsetof(struct ml_generator, frames) == 3 * 8,
	       "as above");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ml_generator);
} generator SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WAYS_MAX);
	__type(key, __u32);
	__type(value, struct ml_way);
} generator_ways SEC(".maps");

/* 1: whether a frame is due. */
static __always_inline int due(struct ml_generator *state)
{
	__u64 now;

	if (state->frames >= state->limit)
		return 0;
	now = bpf_ktime_get_ns();
	if (!state->first) {
		state->first = now;
		state->next = now << 8;
	}
	if (now - state->first >= state->duration)
		return 0;
	if (state->interval) {
		__u64 at = state->next >> 8;

		if (now < at)
			return 0;
		if (now - at > state->late)
			state->late = now - at;
		state->next += state->interval;
	}
	state->last = now;
	return 1;
}

/* 2: which flow and way are next; each flow goes every way before the next. */
static __always_inline __u16 next_port(struct ml_generator *state, __u32 *way)
{
	__u64 flow = state->flow;

	*way = (__u32)state->way;
	if (*way + 1 < ways) {
		state->way = *way + 1;
	} else {
		state->way = 0;
		state->flow = flow + 1 < flows ? flow + 1 : 0;
	}
	return first_port + (__u16)flow;
}

/* 3: the checksum, of which only the source port was missing. */
static __always_inline __u16 finish_checksum(__u16 partial, __u16 port)
{
	__u32 sum = (__u32)partial + port;

	sum = (sum & 0xffff) + (sum >> 16);
	sum = ~sum & 0xffff;
	/* Zero on the wire means "none". */
	return sum ? sum : 0xffff;
}

/* A word of a header becomes another one; what the sum over the header is then. */
static __always_inline __u32 change(__u32 sum, __u16 was, __u16 is)
{
	return sum + (__u16)~was + is;
}

/*
 * A source at random, for a flood. The IP header's checksum follows it. Returns
 * the sum of the bits that were set.
 */
static __always_inline __u32 scatter(__u8 *frame)
{
	__u32 random = bpf_get_prandom_u32() & random_source;
	__u16 *source = (__u16 *)(frame + ETHERNET + 12);
	__u16 *check = (__u16 *)(frame + ETHERNET + 10);
	__u16 high = source[0] | bpf_htons(random >> 16),
	      low = source[1] | bpf_htons((__u16)random);
	__u32 sum = (__u16) ~*check;

	sum = change(sum, source[0], high);
	sum = change(sum, source[1], low);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	*check = ~sum & 0xffff;
	source[0] = high;
	source[1] = low;
	return (random >> 16) + (random & 0xffff);
}

/* 4: the headers. The length is constant, so that the copy has no loop. */
static __always_inline int fill(struct xdp_md *ctx, struct ml_generator *state,
				const __u32 length)
{
	__u8 *frame = (__u8 *)(long)ctx->data;
	struct ml_way *out;
	__u32 way;
	__u16 port;

	if (frame + length > (__u8 *)(long)ctx->data_end)
		return XDP_ABORTED;
	port = next_port(state, &way);
	out = bpf_map_lookup_elem(&generator_ways, &way);
	if (!out)
		return XDP_ABORTED;
	__builtin_memcpy(frame, out->head, length);
	*(__u16 *)(frame + length - UDP) = bpf_htons(port);
	*(__u16 *)(frame + length - 2) =
		bpf_htons(finish_checksum(out->partial, port));
	if (random_source && length == HEAD4) {
		scatter(frame);
		/* Left out, as IPv4 allows. */
		*(__u16 *)(frame + HEAD4 - 2) = 0;
	}
	state->frames++;
	return bpf_redirect(out->device, 0);
}

/* 5: the same for a SYN: its port and number are at random. */
static __always_inline int fill_syn(struct xdp_md *ctx,
				    struct ml_generator *state)
{
	__u8 *frame = (__u8 *)(long)ctx->data;
	const __u32 way = 0;
	struct ml_way *out = bpf_map_lookup_elem(&generator_ways, &way);
	__u32 number = bpf_get_prandom_u32(), sum;
	__u16 port = 1024 + (bpf_get_prandom_u32() & 0x7fff);
	__u16 *tcp = (__u16 *)(frame + ETHERNET + 20);

	if (!out || frame + HEAD_SYN > (__u8 *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memcpy(frame, out->head, HEAD_SYN);
	sum = out->partial + scatter(frame);
	sum += port + (number >> 16) + (number & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	tcp[0] = bpf_htons(port);
	tcp[2] = bpf_htons(number >> 16);
	tcp[3] = bpf_htons(number & 0xffff);
	tcp[8] = bpf_htons(~sum & 0xffff);
	state->frames++;
	return bpf_redirect(out->device, 0);
}

SEC("xdp")
int generate(struct xdp_md *ctx)
{
	const __u32 zero = 0;
	struct ml_generator *state = bpf_map_lookup_elem(&generator, &zero);

	if (!state)
		return XDP_ABORTED;
	if (!due(state))
		return XDP_DROP;
	if (syn)
		return fill_syn(ctx, state);
	return ipv6 ? fill(ctx, state, HEAD6) : fill(ctx, state, HEAD4);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
