// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Steering: which lane of a Manylane socket takes a datagram.
 *
 * Attached to the reuseport group that the lanes form. For each datagram:
 *
 *   1. index   the policy makes a number from the datagram, the CPU or a counter
 *   2. table   user space has laid out which lane stands at that number
 *   3. select  the socket in the lane's slot takes the datagram
 *
 * What fails falls back to the kernel's own choice within the group, which
 * delivers too. Nothing is ever dropped here. A GRO message is steered as one:
 * the program sees its first packet only.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "manylane_abi.h"

#define UDP_HEADER 8

/* Settings, fixed before the program is loaded. */
const volatile __u32 ml_policy;
const volatile __u32 ml_key_offset;
const volatile __u32 ml_key_len;

struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, ML_LANES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ml_lanes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ml_table);
} ml_table SEC(".maps");

/* The next index of round robin: the one counter that all CPUs share. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} ml_next SEC(".maps");

/* Load of each slot; mapped into user space, where lanes write what they took. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ML_LANES_MAX);
	__type(key, __u32);
	__type(value, struct ml_load);
} ml_load SEC(".maps");

/* Messages steered to each slot. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ML_LANES_MAX);
	__type(key, __u32);
	__type(value, __u64);
} ml_steered SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ML_STEER_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} ml_counts SEC(".maps");

static __always_inline void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&ml_counts, &what);

	if (n)
		*n += 1;
}

static __always_inline __u32 table_lane(const struct ml_table *table, __u32 at)
{
	return table->lane[at & (ML_TABLE_SIZE - 1)];
}

/*
 * The scale of the kernel's own choice: the table's first layout then puts
 * (nearly) every flow where the kernel would have put it.
 */
static __always_inline __u32 scale(__u32 hash)
{
	return hash >> 22;
}

_Static_assert(ML_TABLE_SIZE == 1 << 10, "scale() takes the ten top bits");

/* Stage 1 for keys: the hash of user space's key_hash() and of the classic program. */
static __always_inline __u32 key_index(struct sk_reuseport_md *ctx)
{
	__u8 key[ML_KEY_MAX] = {};
	__u32 hash = 0x9e3779b9 ^ ml_key_len;
	__u32 i;

	if (ctx->len < UDP_HEADER + ml_key_offset + ml_key_len ||
	    ml_key_len == 0 || ml_key_len > ML_KEY_MAX ||
	    bpf_skb_load_bytes(ctx, UDP_HEADER + ml_key_offset, key,
			       ml_key_len)) {
		count(ML_STEER_SHORT);
		return scale(ctx->hash);
	}
	for (i = 0; i < ML_KEY_MAX / 4; i++) {
		__u32 word = key[4 * i] << 24 | key[4 * i + 1] << 16 |
			     key[4 * i + 2] << 8 | key[4 * i + 3];

		if (4 * i >= ml_key_len)
			break;
		hash = (hash ^ word) * 0x85ebca6b;
		hash ^= hash >> 13;
	}
	hash *= 0xc2b2ae35;
	return scale(hash ^ hash >> 16);
}

static __always_inline __u32 round_robin_index(const struct ml_table *table)
{
	__u32 zero = 0;
	__u64 *next = bpf_map_lookup_elem(&ml_next, &zero);
	__u32 size = table->size;

	if (!next || !size)
		return 0;
	return __sync_fetch_and_add(next, 1) % size;
}

static __always_inline __s64 depth(__u32 lane)
{
	struct ml_load *load = bpf_map_lookup_elem(&ml_load, &lane);

	return load ? (__s64)(load->steered - load->received) : 0;
}

/* The emptier of two different lanes picked at random (power of two choices). */
static __always_inline __u32 least_loaded_lane(const struct ml_table *table)
{
	__u32 size = table->size, rnd = bpf_get_prandom_u32();
	__u32 one, two, lane, at, step;
	struct ml_load *load;

	if (size < 2)
		return table_lane(table, 0);
	at = (rnd & 0xffff) % size;
	step = 1 + (rnd >> 16) % (size - 1);
	one = table_lane(table, at);
	two = table_lane(table, (at + step) % size);
	lane = depth(two) < depth(one) ? two : one;
	load = bpf_map_lookup_elem(&ml_load, &lane);
	if (load)
		__sync_fetch_and_add(&load->steered, 1);
	return lane;
}

/* Stages 1 and 2. */
static __always_inline __u32 pick_lane(struct sk_reuseport_md *ctx,
				       const struct ml_table *table)
{
	__u32 size = table->size;

	switch (ml_policy) {
	case ML_ROUND_ROBIN:
		return table_lane(table, round_robin_index(table));
	case ML_CPU:
		return table_lane(table, bpf_get_smp_processor_id());
	case ML_RANDOM:
		return table_lane(table,
				  size ? bpf_get_prandom_u32() % size : 0);
	case ML_LEAST_LOADED:
		return least_loaded_lane(table);
	case ML_KEY:
		return table_lane(table, key_index(ctx));
	default:
		return table_lane(table, scale(ctx->hash));
	}
}

SEC("sk_reuseport")
int ml_steer(struct sk_reuseport_md *ctx)
{
	__u32 zero = 0, lane;
	struct ml_table *table = bpf_map_lookup_elem(&ml_table, &zero);
	__u64 *steered;

	if (!table)
		return SK_PASS;
	lane = pick_lane(ctx, table);

	/* Stage 3. */
	if (bpf_sk_select_reuseport(ctx, &ml_lanes, &lane, 0)) {
		count(ML_STEER_KERNEL);
		return SK_PASS;
	}
	steered = bpf_map_lookup_elem(&ml_steered, &lane);
	if (steered)
		*steered += 1;
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
