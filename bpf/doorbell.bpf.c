/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Says that something is about to be queued on a companion, in a word that lanes
 * read without a system call. As a filter of the socket it sees all that the
 * kernel is to queue there, whichever way it came, and keeps all of it.
 *
 * The word moves before the datagram is there: who looks at once may have to
 * look again.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} ml_rings SEC(".maps");

SEC("socket")
int ml_doorbell(struct __sk_buff *skb)
{
	__u32 only = 0;
	__u64 *rings = bpf_map_lookup_elem(&ml_rings, &only);

	(void)skb;
	if (rings)
		__sync_fetch_and_add(rings, 1);
	/* All bytes of it. */
	return -1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
