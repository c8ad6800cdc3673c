/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Waits for more descriptors than the library checks:
 *
 *	many_fds CASE WORKER
 *
 * Two threads are parked, and datagrams arrive for the lane of one. The other
 * one, WORKER (0 or 1), receives one each time a wait reports one. select: sets
 * of 2048 bits. high: such a set, and the descriptor is above the first 1024.
 * short: a set of 1024 bits before inaccessible memory, with a count of 2048.
 * poll: 1100 entries. Prints how many were received, which is all.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>

#define DATAGRAMS 20
#define BITS 2048
#define ENTRIES 1100
/* Seconds: without the library it takes none of them. */
#define TIMEOUT_S 100

static const char *what;
static int fd;
static fd_set *set;
static struct pollfd fds[ENTRIES];
static _Atomic int got, ended;

static int is_reported(void)
{
	long *words = (long *)set, bit = 1L << fd % (8 * sizeof(*words));
	int i;

	if (!strcmp(what, "poll")) {
		for (i = 0; i < ENTRIES; i++)
			fds[i] = (struct pollfd){ .fd = -1 };
		fds[ENTRIES - 1] =
			(struct pollfd){ .fd = fd, .events = POLLIN };
		i = poll(fds, ENTRIES, -1);
		if (i != 1 || fds[ENTRIES - 1].revents != POLLIN)
			printf("poll: %d\n", i);
		return i == 1;
	}
	words += fd / (8 * sizeof(*words));
	*words |= bit;
	i = select(BITS, set, NULL, NULL, NULL);
	if (i != 1 || *words != bit)
		printf("select: %d %s\n", i, i < 0 ? strerror(errno) : "");
	*words &= ~bit;
	return i == 1;
}

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	struct timespec start, now;
	char data[64];

	(void)nth, (void)payload, (void)from;
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		if (!is_reported())
			break;
		if (recv(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
			got++;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (got < DATAGRAMS && now.tv_sec - start.tv_sec < TIMEOUT_S);
	ended = 1;
	for (;;)
		raw_sleep();
}

int main(int argc, char **argv)
{
	struct rlimit limit;
	char *pages;
	int i, worker_index;

	if (argc != 3)
		return 2;
	what = argv[1];
	worker_index = atoi(argv[2]);
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
	setrlimit(RLIMIT_NOFILE, &limit);
	start_and_park();
	pin_to_this_cpu();
	fd = strcmp(what, "high") ? server : fcntl(server, F_DUPFD, 1500);
	pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	set = (fd_set *)pages;
	if (!strcmp(what, "short")) {
		set = (fd_set *)(pages + 4096 - sizeof(fd_set));
		mprotect(pages + 4096, 4096, PROT_NONE);
	}
	for (i = 0; i < DATAGRAMS; i++)
		send_one('x', nth_flow(!worker_index, i), i);
	/* This datagram starts it. */
	send_one('x', nth_flow(worker_index, 0), 0);
	wait_for_delivery();
	park[worker_index] = 0;
	while (!ended)
		raw_sleep();
	printf("%d of %d\n", got, DATAGRAMS);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
