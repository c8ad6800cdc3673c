/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Stage 5 of the XDP program: the filter of a socket. Its prefixes come first,
 * of which the longest match decides, then its limits.
 *
 * A limit is a token bucket for each source, which is an address or a prefix. A
 * bucket is one word: the time up to which its source has used its tokens, at
 * most `room` ahead of the clock. A bucket behind the clock is full. So a source
 * without a bucket is treated like one that was quiet: the least recently used
 * bucket may be evicted when a map is full, and no datagram is dropped for want
 * of a bucket.
 *
 * Buckets are found in maps that all CPUs share: in maps per CPU, a source
 * would have its rate once for each queue that its flows come in on. Two CPUs
 * may use one bucket at once. They add with one atomic instruction, so that no
 * update is lost; only the check before it may be stale. So a source
 * can get one datagram per further CPU more than its burst, once, and nothing
 * above its rate. The clock is put forward with a plain store, which two CPUs
 * do in the same moment with nearly the same time; what is lost between is
 * within that burst. (A compare and exchange would need Linux 5.12.)
 */
#ifndef MANYLANE_FILTER_H
#define MANYLANE_FILTER_H

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ML_SOCKETS_MAX);
	__type(key, __u32);
	__type(value, struct ml_filter);
} ml_filters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, ML_RULES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ml_rule);
	__type(value, __u32);
} ml_rules SEC(".maps");

/*
 * Buckets of the first limit and of the second one: many addresses push no
 * prefix out. Their size is set by who loads the program.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct ml_source);
	__type(value, __u64);
} ml_wide SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct ml_source);
	__type(value, __u64);
} ml_narrow SEC(".maps");

/* Drops of each socket, by its number. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ML_SOCKETS_MAX);
	__type(key, __u32);
	__type(value, struct ml_filter_drops);
} ml_filter_drops SEC(".maps");

/* 5a: what the longest prefix says that the address is in; 0 without one. */
static __always_inline __u32 rule_of(__u32 socket, __u32 family,
				     const struct ml_addr *from)
{
	struct ml_rule key = {
		.bits = ML_RULE_HEAD + 8 * sizeof(key.ip),
		.socket = socket,
		.family = family,
	};
	__u32 *rule;

	__builtin_memcpy(key.ip, from->ip, sizeof(key.ip));
	rule = bpf_map_lookup_elem(&ml_rules, &key);
	return rule ? *rule : 0;
}

/* 5b: the bucket of a source; a full one if it had none. */
static __always_inline __u64 *bucket_of(void *buckets,
					const struct ml_filter *filter,
					const struct ml_limit *limit,
					__u32 socket, __u32 family,
					const struct ml_addr *from, __u64 now)
{
	struct ml_source key = {
		.generation = filter->generation,
		.socket = socket,
		.family = family,
	};
	const __u32 *mask = limit->mask[family != ML_IP4];
	const __u32 *ip = (const __u32 *)from->ip;
	__u32 *masked = (__u32 *)key.ip;
	__u64 *bucket;
	int i;

#pragma unroll
	for (i = 0; i < 4; i++)
		masked[i] = ip[i] & mask[i];
	bucket = bpf_map_lookup_elem(buckets, &key);
	if (bucket)
		return bucket;
	/* Another CPU may have made it meanwhile. */
	bpf_map_update_elem(buckets, &key, &now, BPF_NOEXIST);
	return bpf_map_lookup_elem(buckets, &key);
}

/* 5c: whether the bucket has something left. A quiet source's is full. */
static __always_inline int has_left(__u64 *bucket, const struct ml_limit *limit,
				    __u64 now)
{
	__u64 until = *bucket;

	if (until < now) {
		*bucket = now;
		until = now;
	}
	return until + limit->cost <= now + limit->room;
}

/*
 * 5d: whether a datagram is within both limits, and if so, takes it from both
 * buckets. The widest comes first: what its bucket refuses makes no other.
 */
static __always_inline int is_within(const struct ml_filter *filter,
				     __u32 socket, __u32 family,
				     const struct ml_addr *from)
{
	const struct ml_limit *wide = &filter->limit[0];
	const struct ml_limit *narrow = &filter->limit[1];
	__u64 *first, *second = NULL;
	__u64 now = bpf_ktime_get_ns();

	first = bucket_of(&ml_wide, filter, wide, socket, family, from, now);
	if (first && !has_left(first, wide, now))
		return 0;
	if (narrow->cost) {
		second = bucket_of(&ml_narrow, filter, narrow, socket, family,
				   from, now);
		if (second && !has_left(second, narrow, now))
			return 0;
	}
	if (first)
		__sync_fetch_and_add(first, wide->cost);
	if (second)
		__sync_fetch_and_add(second, narrow->cost);
	return 1;
}

/* The reason to drop the datagram; 0 to admit it. */
static __always_inline int check_filter(__u32 socket, __u32 family,
					const struct ml_addr *from)
{
	const struct ml_filter *filter =
		bpf_map_lookup_elem(&ml_filters, &socket);
	struct ml_filter_drops *drops;
	__u32 rule;

	if (!filter || !(filter->rules || filter->limit[0].cost))
		return 0;
	rule = filter->rules ? rule_of(socket, family, from) : 0;
	if (rule == ML_ALLOW)
		return 0;
	if (rule != ML_DENY &&
	    (!filter->limit[0].cost || is_within(filter, socket, family, from)))
		return 0;
	drops = bpf_map_lookup_elem(&ml_filter_drops, &socket);
	if (drops && rule == ML_DENY)
		drops->denied++;
	else if (drops)
		drops->limited++;
	return rule == ML_DENY ? ML_XDP_DENIED : ML_XDP_LIMITED;
}

#endif /* MANYLANE_FILTER_H */
