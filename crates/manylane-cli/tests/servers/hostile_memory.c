/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What a program writes into the memory that it shares with the launcher. */
#include "hostile.h"

/* Moves the producers of a lease's RX rings until its parent ends it. */
static void move_producers(struct lease *lease)
{
	int i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;)
		for (i = 0; i < lease->count; i++) {
			struct ring *rx = &lease->rings[i][RX];

			*rx->producer = *rx->consumer + rx->entries / 2;
		}
}

/* Rings that never become empty, at the end of a lease. */
void test_moving_producers(void)
{
	struct lease first, second;
	struct mll_message message;
	pid_t movers[2];
	int i, fd;

	request_lease(&first, "the first", open_udp(ip, 0));
	send_command(&first, "open", MLL_OPEN);
	port++;
	fd = open_udp(ip, 0);
	request_lease(&second, "the second", fd);
	send_command(&second, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &second, marker)));
	fflush(stdout);
	for (i = 0; i < first.count; i++) {
		struct ring *rx = &first.rings[i][RX];

		memset(rx->at + rx->slots, 0xff, rx->len - rx->slots);
		/* The lock, behind the frames: not held. */
		*(volatile uint64_t *)(first.bytes[i] +
				       first.terms[i].frames * 2048UL) = 0;
	}
	for (i = 0; i < 2; i++) {
		movers[i] = fork();
		if (movers[i])
			continue;
		close(first.end);
		close(second.end);
		close(fd);
		move_producers(&first);
	}
	usleep(100000);
	close(first.end);
	usleep(100000);
	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the second", receive_message(second.end, &message, NULL),
		      &message);
	for (i = 0; i < 2; i++) {
		kill(movers[i], SIGKILL);
		waitpid(movers[i], NULL, 0);
	}
}

static void request_second_lease(void *with)
{
	struct lease lease;

	(void)with;
	if (request_lease(&lease, "another process", open_udp(ip, 1)))
		send_command(&lease, "open", MLL_OPEN);
}

static void inspect_lease(void *with)
{
	struct lease lease, *before = with;
	struct stat ours, theirs;

	if (!request_lease(&lease, "another process", open_udp(ip, 1)))
		return;
	send_command(&lease, "open", MLL_OPEN);
	marker = "for the second";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	printf("seen by the first: %s\n",
	       yes_or_no(ring_contains(before, marker)));
	printf("left by the first: %s\n",
	       yes_or_no(ring_contains(&lease, "for the first")));
	fstat(lease.next_hops, &ours);
	fstat(before->next_hops, &theirs);
	printf("the same next hops: %s\n",
	       yes_or_no(ours.st_ino == theirs.st_ino));
}

/* A process that had a queue keeps as much of it as it can. */
void test_kept_queues(void)
{
	struct lease lease;
	int i, ring, fd = open_udp(ip, 1);

	request_lease(&lease, "the first", fd);
	send_command(&lease, "open", MLL_OPEN);
	marker = "for the first";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	port++;
	run_in_child(request_second_lease, NULL);
	/* It returns the lease, and keeps the sockets and the memory. */
	port--;
	close(lease.end);
	serves("the first", fd);
	port++;
	run_in_child(request_second_lease, NULL);
	/* Only the memory. */
	for (i = 0; i < lease.count; i++) {
		for (ring = 0; ring < RINGS; ring++)
			munmap(lease.rings[i][ring].at,
			       lease.rings[i][ring].len);
		close(lease.xsk[i]);
	}
	run_in_child(inspect_lease, &lease);
}

/*
 * Fills a ring with ones. The kernel always believes a producer, and processes
 * entry by entry: a ring that it consumes gets only a few rings' worth.
 */
static void corrupt_ring(struct ring *ring, int is_consumed_by_kernel)
{
	if (!is_consumed_by_kernel) {
		memset(ring->at, 0xff, ring->len);
		return;
	}
	memset(ring->at + ring->slots, 0xff, ring->len - ring->slots);
	*ring->consumer = UINT32_MAX;
	*ring->producer += 3 * ring->entries;
}

/* All shared memory is full of ones. */
void test_corrupt_memory(void)
{
	struct lease lease;
	size_t len;
	char *at;
	int i, ring;

	request_lease(&lease, "the first", open_udp(ip, 0));
	send_command(&lease, "open", MLL_OPEN);
	len = lseek(lease.next_hops, 0, SEEK_END);
	at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED,
		  lease.next_hops, 0);
	for (i = 0; i < 100; i++) {
		int n;

		memset(at, i % 2 ? 0xff : 2, len);
		for (n = 0; n < lease.count; n++) {
			memset(lease.bytes[n], i % 2 ? 0xff : 1, lease.len[n]);
			for (ring = 0; ring < RINGS; ring++)
				corrupt_ring(&lease.rings[n][ring],
					     ring == TX || ring == FILL);
		}
		send_to_port("nowhere");
		usleep(10000);
	}
	/* Truncated files would kill the processes that have them mapped. */
	printf("shorter: %s\n", yes_or_no(!ftruncate(lease.next_hops, 0) ||
					  !ftruncate(lease.memory[0], 0)));
}
