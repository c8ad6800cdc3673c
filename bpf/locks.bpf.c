/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Contentions of the kernel's locks in one process: number and wait times, by
 * lock and by the stack of the waiting thread. The tracepoints fire only where
 * a thread waits (Linux 5.19), so uncontended locks cost nothing and are not
 * counted.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* The process that is observed; set before the program is loaded. */
const volatile __u32 ml_process;

#define WAITERS_MAX 4096
#define PLACES_MAX 4096
#define STACKS_MAX 4096
#define DEPTH 127

struct ml_waiter {
	__u64 lock;
	__u64 thread;
};

struct ml_wait {
	__u64 since; /* ns */
	__u32 stack;
	__u32 flags;
};

struct ml_place {
	__u64 lock;
	__u32 stack;
	__u32 flags; /* LCB_F_* of the kernel: 1 spins, 32 is a mutex */
};
_Static_assert(sizeof(struct ml_place) == 16, "as lab/locks.rs has it");

struct ml_waits {
	__u64 count;
	__u64 ns;
	__u64 longest; /* ns */
};
_Static_assert(sizeof(struct ml_waits) == 24, "as lab/locks.rs has it");

/* Of each thread and lock at most one wait is under way. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, WAITERS_MAX);
	__type(key, struct ml_waiter);
	__type(value, struct ml_wait);
} ml_waiting SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, PLACES_MAX);
	__type(key, struct ml_place);
	__type(value, struct ml_waits);
} ml_waited SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, STACKS_MAX);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, DEPTH * sizeof(__u64));
} ml_stacks SEC(".maps");

/* Waits that found no room above: the sums say what they miss. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} ml_missed SEC(".maps");

static __always_inline void missed(void)
{
	const __u32 zero = 0;
	__u64 *count = bpf_map_lookup_elem(&ml_missed, &zero);

	if (count)
		(*count)++;
}

static __always_inline int is_ours(__u64 id)
{
	return (__u32)(id >> 32) == ml_process;
}

SEC("raw_tp/contention_begin")
int ml_begin(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct ml_waiter key = { .lock = ctx->args[0], .thread = id };
	struct ml_wait wait = { .flags = (__u32)ctx->args[1] };
	long stack;

	if (!is_ours(id))
		return 0;
	/* Of two stacks with one hash the first one is kept. */
	stack = bpf_get_stackid(ctx, &ml_stacks, 0);
	wait.stack = stack < 0 ? ~0U : (__u32)stack;
	wait.since = bpf_ktime_get_ns();
	/* A wait for a mutex that spins first begins twice: it counts once. */
	if (bpf_map_update_elem(&ml_waiting, &key, &wait, BPF_NOEXIST) &&
	    !bpf_map_lookup_elem(&ml_waiting, &key))
		missed();
	return 0;
}

SEC("raw_tp/contention_end")
int ml_end(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct ml_waiter key = { .lock = ctx->args[0], .thread = id };
	struct ml_waits first = { .count = 1 }, *known;
	struct ml_wait *wait;
	struct ml_place at;

	if (!is_ours(id))
		return 0;
	wait = bpf_map_lookup_elem(&ml_waiting, &key);
	if (!wait)
		return 0;
	at.lock = key.lock;
	at.stack = wait->stack;
	at.flags = wait->flags;
	first.ns = bpf_ktime_get_ns() - wait->since;
	first.longest = first.ns;
	bpf_map_delete_elem(&ml_waiting, &key);
	known = bpf_map_lookup_elem(&ml_waited, &at);
	if (!known) {
		if (bpf_map_update_elem(&ml_waited, &at, &first, BPF_NOEXIST))
			missed();
		return 0;
	}
	known->count++;
	known->ns += first.ns;
	if (first.ns > known->longest)
		known->longest = first.ns;
	return 0;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
