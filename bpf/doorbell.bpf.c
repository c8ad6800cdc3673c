/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Says that something is about to be queued on a companion, in a word that lanes
 * read without a system call. As a filter of the socket it sees all that the
 * kernel is to queue there, whichever way it came, and keeps all of it.
 *
 * All companions of a socket have one word, and what comes to them comes on any
 * processor. So it is not written for each datagram, but only if a lane has
 * heard it since it moved: what it says while nobody has, it says already.
 *
 * The word moves before the datagram is there: who looks at once may have to
 * look again.
 */
#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "manylane_abi.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ml_doorbell);
} ml_bell SEC(".maps");

SEC("socket")
int ml_doorbell(struct __sk_buff *skb)
{
	__u32 only = 0;
	volatile struct ml_doorbell *bell;

	(void)skb;
	bell = bpf_map_lookup_elem(&ml_bell, &only);
	if (bell && bell->rings == bell->heard)
		__sync_fetch_and_add(&bell->rings, 1);
	/* All bytes of it. */
	return -1;
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
