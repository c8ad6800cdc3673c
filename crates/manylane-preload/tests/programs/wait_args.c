/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Waits with unusual arguments, and their answers:
 *
 *	wait_args lanes|one
 *
 * A socket with lanes whose owners are away, or with one receiver. All output
 * is the same with the library as without.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <dlfcn.h>
#include <limits.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>

#define NONE 0
#define OWN 1
#define OTHERS 2
#define SECOND 1000000000L
/* 500 s in microseconds. */
#define OVERFLOWING_USECS 500000000L

static int epoll, pipes[2], closed, idle;
static long page;
/* Hidden from the compiler. */
static struct pollfd *volatile no_fds;
static struct epoll_event *volatile no_events;
static volatile nfds_t too_many = -1;
static volatile int fewer = -1, far_too_many = INT_MAX;

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)payload, (void)from;
}

static void drain(void)
{
	char data[64];

	while (recv(server, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
}

/* Queues one datagram, or none, in the lane of either of the two. */
static void queue_one(int what)
{
	drain();
	if (what != NONE)
		send_one('x', nth_flow(what == OTHERS, 0), 0);
	wait_for_delivery();
}

static const char *error(long answer)
{
	return answer < 0 ? strerrorname_np(errno) : "";
}

#define PRINT(call)                                                   \
	do {                                                          \
		long answer = (call);                                 \
		printf("%s: %ld %s\n", #call, answer, error(answer)); \
	} while (0)

static const struct poll_row {
	const char *what;
	int count;
	struct {
		int *fd, events;
	} of[4];
} poll_rows[] = {
	{ "one", 1, { { &server, POLLIN } } },
	{ "normal", 1, { { &server, POLLRDNORM } } },
	{ "for nothing", 1, { { &server, 0 } } },
	{ "urgent", 1, { { &server, POLLPRI } } },
	{ "both ways", 1, { { &server, POLLIN | POLLOUT } } },
	{ "twice", 2, { { &server, POLLIN }, { &server, POLLIN } } },
	{ "twice, each way", 2, { { &server, POLLOUT }, { &server, POLLIN } } },
	{ "beside a negative one",
	  2,
	  { { &idle, POLLIN }, { &server, POLLIN } } },
	{ "beside a closed one",
	  2,
	  { { &closed, POLLIN }, { &server, POLLIN } } },
	{ "beside another",
	  3,
	  { { &server, POLLIN }, { pipes, POLLIN }, { pipes + 1, POLLOUT } } },
};

static void test_poll(int timeout)
{
	unsigned row;
	int i;

	for (row = 0; row < sizeof(poll_rows) / sizeof(*poll_rows); row++) {
		const struct poll_row *at = poll_rows + row;
		struct pollfd fds[4];

		for (i = 0; i < at->count; i++)
			fds[i] = (struct pollfd){ *at->of[i].fd,
						  at->of[i].events, -1 };
		printf("poll %s: %d:", at->what, poll(fds, at->count, timeout));
		for (i = 0; i < at->count; i++)
			printf(" %x", fds[i].revents & 0xffff);
		printf("\n");
	}
	PRINT(poll(no_fds, 1, timeout));
	PRINT(poll(no_fds, too_many, timeout));
}

/* More than the limit of descriptors, and the rest is not readable. */
static void test_limit(void)
{
	struct rlimit limit;
	char *at = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct pollfd *volatile fds = (struct pollfd *)(at + page) - 1;

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = 1024;
	setrlimit(RLIMIT_NOFILE, &limit);
	mprotect(at + page, page, PROT_NONE);
	*fds = (struct pollfd){ .fd = server, .events = POLLIN };
	too_many = 100000;
	PRINT(poll(fds, too_many, 0));
	PRINT(ppoll(fds, too_many, NULL, NULL));
}

static const struct select_row {
	const char *what;
	/* How far the count is above the largest descriptor. */
	int more;
	int *read[2], *write[2], *except[2];
} select_rows[] = {
	{ "one", 1, { &server }, { 0 }, { 0 } },
	{ "too short", 0, { &server }, { 0 }, { 0 } },
	{ "all ways", 1, { &server }, { &server }, { &server } },
	{ "except", 1, { 0 }, { 0 }, { &server } },
	{ "beside a closed one", 1, { &server, &closed }, { 0 }, { 0 } },
	{ "except a closed one", 1, { &server }, { 0 }, { &closed } },
	{ "beside others", 1, { &server, pipes }, { pipes + 1 }, { pipes } },
	{ "of all", 1024, { &server }, { &server }, { 0 } },
};

static int fill_set(fd_set *set, int *const fds[2])
{
	int i, top = -1;

	FD_ZERO(set);
	for (i = 0; i < 2 && fds[i]; i++) {
		FD_SET(*fds[i], set);
		top = top > *fds[i] ? top : *fds[i];
	}
	return top;
}

static void test_select(long usec)
{
	unsigned row;
	int i, tops[3], count;
	fd_set sets[3];

	for (row = 0; row < sizeof(select_rows) / sizeof(*select_rows); row++) {
		const struct select_row *at = select_rows + row;
		struct timeval time = { 0, usec };

		tops[0] = fill_set(sets, at->read);
		tops[1] = fill_set(sets + 1, at->write);
		tops[2] = fill_set(sets + 2, at->except);
		count = tops[0] > tops[1] ? tops[0] : tops[1];
		count = (count > tops[2] ? count : tops[2]) + at->more;
		/* Bits above the count, in the same word. */
		if (tops[0] >= 0 && (count & ~63) < 63)
			FD_SET(63, sets);
		count = at->more == 1024 ? 1024 : count;
		if (count > 63)
			FD_CLR(63, sets);
		i = select(count, sets, sets + 1,
			   at->except[0] ? sets + 2 : NULL, &time);
		printf("select %s: %d %s:", at->what, i, error(i));
		for (i = 0; i < 3; i++)
			printf(" %lx", *(long *)(sets + i));
		printf("\n");
	}
}

static long elapsed(const struct timespec *since)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (now.tv_sec - since->tv_sec) * SECOND + now.tv_nsec -
	       since->tv_nsec;
}

/* `all`: the sockets in the instance that are ready. */
static void test_epoll(int timeout, unsigned all)
{
	struct epoll_event events[4];
	struct timespec start;
	unsigned seen = 0;
	int i;

	PRINT(epoll_wait(epoll, events, 0, timeout));
	PRINT(epoll_wait(epoll, events, fewer, timeout));
	PRINT(epoll_wait(epoll, events, far_too_many, timeout));
	PRINT(epoll_wait(-1, events, 4, timeout));
	PRINT(epoll_wait(closed, events, 4, timeout));
	PRINT(epoll_wait(server, events, 4, timeout));
	PRINT(epoll_wait(epoll, no_events, 4, timeout));
	PRINT(epoll_ctl(epoll, EPOLL_CTL_ADD, server, no_events));
	/*
	 * With room for one event, each is reported in turn, after a slice at
	 * the latest.
	 */
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (i = 0; i < 100 || (seen != all && elapsed(&start) < 60 * SECOND);
	     i++)
		if (epoll_wait(epoll, events, 1, timeout) == 1)
			seen |= 1 << events->data.u32;
	printf("in turn: %x\n", seen);
}

enum call {
	SELECT,
	PSELECT,
	PPOLL,
	EPOLL_PWAIT2
};
static const char *const names[] = { "select", "pselect", "ppoll",
				     "epoll_pwait2" };

/*
 * Waits for `sec` and `part`, micro- or nanoseconds; writes the time that
 * select left.
 */
static int timed_wait(enum call call, long sec, long part, struct timeval *left)
{
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct timespec time = { sec, part };
	struct epoll_event event;
	fd_set set;

	FD_ZERO(&set);
	FD_SET(server, &set);
	*left = (struct timeval){ sec, part };
	switch (call) {
	case SELECT:
		return select(server + 1, &set, NULL, NULL, left);
	case PSELECT:
		return pselect(server + 1, &set, NULL, NULL, &time, NULL);
	case PPOLL:
		return ppoll(&at, 1, &time, NULL);
	default:
		return epoll_pwait2(epoll, &event, 1, &time, NULL);
	}
}

static void test_times(void)
{
	static const long all[][2] = {
		{ 0, 0 },
		{ 5, 0 },
		{ -1, 0 },
		{ 0, -1 },
		{ -1, 5 },
		{ 5, -5 },
		{ 0, SECOND - 1 },
		{ 0, SECOND },
		{ 1, 2 * SECOND },
		{ -1, 2 * SECOND },
		{ 0, 3 * SECOND },
		{ LONG_MAX, 0 },
		{ 1L << 61, 5 },
		{ LONG_MAX, 999999 },
		{ LONG_MIN, 0 },
		{ LONG_MIN, -1 },
		{ 1000, OVERFLOWING_USECS },
	};
	struct timeval left;
	unsigned row;
	enum call call;
	int i;

	for (row = 0; row < sizeof(all) / sizeof(*all); row++)
		for (call = SELECT; call <= EPOLL_PWAIT2; call++) {
			i = timed_wait(call, all[row][0], all[row][1], &left);
			printf("%s %ld %ld: %d %s", names[call], all[row][0],
			       all[row][1], i, error(i));
			if (call == SELECT && i >= 0)
				printf(", carried: %s, long: %s",
				       left.tv_sec > 1000 &&
						       left.tv_sec <= 1500 ?
					       "yes" :
					       "no",
				       left.tv_sec > 1L << 60 ? "yes" : "no");
			printf("\n");
		}
}

/* None of these ends early, and the remaining time is then 0. */
static void test_durations(void)
{
	static const struct {
		enum call call;
		long sec, part, nanos;
	} all[] = {
		{ SELECT, 0, 1300000, 1300000000 },
		{ SELECT, 0, 300, 300000 },
		{ SELECT, 0, 30000, 30000000 },
		{ PSELECT, 0, 30000000, 30000000 },
		{ PPOLL, 0, 300000, 300000 },
		{ EPOLL_PWAIT2, 0, 300000, 300000 },
		{ EPOLL_PWAIT2, 0, 2300000, 2300000 },
		{ EPOLL_PWAIT2, 0, 30300000, 30300000 },
	};
	_Atomic unsigned *coarse = dlsym(RTLD_DEFAULT, "ms_waits");
	unsigned row, before = coarse ? *coarse : 0;
	struct timespec start;
	struct timeval left;
	int i;

	for (row = 0; row < sizeof(all) / sizeof(*all); row++) {
		clock_gettime(CLOCK_MONOTONIC, &start);
		i = timed_wait(all[row].call, all[row].sec, all[row].part,
			       &left);
		printf("%s %ld %ld: %d, in time: %s", names[all[row].call],
		       all[row].sec, all[row].part, i,
		       i >= 0 && elapsed(&start) < all[row].nanos ? "no" :
								    "yes");
		if (all[row].call == SELECT)
			printf(", left: %ld", left.tv_sec + left.tv_usec);
		printf("\n");
	}
	printf("in milliseconds: %u\n", (coarse ? *coarse : 0) - before);
}

int main(int argc, char **argv)
{
	static const char *const names[] = { "nothing", "own", "others" };
	struct epoll_event event = { .events = EPOLLIN };
	struct timeval none = { 0, 0 };
	int i, more;

	if (argc != 2 || pipe(pipes))
		return 2;
	page = sysconf(_SC_PAGESIZE);
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (*argv[1] == 'l') {
		start_and_park();
	} else {
		server = loopback_server(0, &address);
		for (i = 0; i < FLOWS; i++) {
			clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
			owner[i] = i % WORKERS;
		}
	}
	pin_to_this_cpu();
	idle = -1;
	/* No other descriptor gets the number. */
	closed = 60;
	close(closed);
	epoll = epoll_create1(0);
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	for (i = NONE; i <= OTHERS; i++) {
		printf("-- %s\n", names[i]);
		queue_one(i);
		test_poll(0);
		test_select(0);
		test_epoll(0, i != NONE);
		if (i != NONE)
			test_times();
		else
			test_durations();
	}
	test_limit();
	queue_one(OTHERS);
	PRINT(select(-1, NULL, NULL, NULL, &none));
	PRINT(select(0, NULL, NULL, NULL, &none));
	/* Two more sockets, one of which always has a datagram. */
	for (i = 1; i <= 2; i++) {
		struct sockaddr_in to;

		more = loopback_server(0, &to);
		event.data.u32 = i;
		epoll_ctl(epoll, EPOLL_CTL_ADD, more, &event);
		sendto(more, "x", 1, 0, (void *)&to, sizeof(to));
	}
	test_epoll(0, 7);
	test_epoll(5, 7);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
