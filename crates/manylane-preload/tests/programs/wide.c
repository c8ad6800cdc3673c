/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Waits for more than the library looks through:
 *
 *	wide CASE WORKER
 *
 * Two threads are parked, and datagrams come for the lane of one; the other one,
 * WORKER (0 or 1), receives one for each time that a wait tells of one. CASE: select (sets of
 * 2048 bits), high (such a set, and the descriptor is behind the first 1024),
 * short (a set of 1024 bits before memory that nobody may touch, and 2048 as
 * their count), poll (1100 entries). Prints how many came, which are all.
 */
#define _GNU_SOURCE
#include "shares.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>

#define SOME 20
#define MANY 2048
#define ENTRIES 1100
/* Seconds: natively it takes none of them. */
#define PATIENCE 20

static const char *what;
static int fd;
static fd_set *set;
static struct pollfd fds[ENTRIES];
static _Atomic int got, ended;

static int told(void)
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
	i = select(MANY, set, NULL, NULL, NULL);
	if (i != 1 || *words != bit)
		printf("select: %d %s\n", i, i < 0 ? strerror(errno) : "");
	*words &= ~bit;
	return i == 1;
}

static void handle(unsigned nth, const struct word *word,
		   const struct sockaddr_in *from)
{
	struct timespec start, now;
	char data[64];

	(void)nth, (void)word, (void)from;
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		if (!told())
			break;
		if (recv(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
			got++;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (got < SOME && now.tv_sec - start.tv_sec < PATIENCE);
	ended = 1;
	for (;;)
		nap();
}

int main(int argc, char **argv)
{
	struct rlimit limit;
	char *pages;
	int i, who;

	if (argc != 3)
		return 2;
	what = argv[1];
	who = atoi(argv[2]);
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
	setrlimit(RLIMIT_NOFILE, &limit);
	start_and_park();
	stay_here();
	fd = strcmp(what, "high") ? server : fcntl(server, F_DUPFD, 1500);
	pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	set = (fd_set *)pages;
	if (!strcmp(what, "short")) {
		set = (fd_set *)(pages + 4096 - sizeof(fd_set));
		mprotect(pages + 4096, 4096, PROT_NONE);
	}
	for (i = 0; i < SOME; i++)
		send_one('x', flow_of(!who, i), i);
	/* With this one it begins. */
	send_one('x', flow_of(who, 0), 0);
	settle();
	park[who] = 0;
	while (!ended)
		nap();
	printf("%d of %d\n", got, SOME);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
