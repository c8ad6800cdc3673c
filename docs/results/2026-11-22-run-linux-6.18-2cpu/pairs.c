/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What one receiver costs with the library and without, finely:
 *
 *	pairs WAY LIBRARY PAIRS MILLISECONDS
 *
 * Two servers, one of them with LIBRARY preloaded, wait on processor 0 for the
 * whole run; the client, on processor 1, asks one and then the other, in an
 * order that is drawn for each pair, with 16 requests of 32 bytes on their way.
 * WAY is "none" (recvfrom and sendto alone), "epoll" or "poll". Prints, for each
 * pair, nanoseconds of CPU of the server for a request without and with; at the
 * end the median of the ratios with its 95 % interval (bootstrap, 10,000 draws)
 * and how many of the ratios were above one.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define WINDOW 16
#define MOST 1000

static double now(clockid_t clock)
{
	struct timespec time;

	clock_gettime(clock, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static _Noreturn void serve(const char *way)
{
	struct sockaddr_in address = { .sin_family = AF_INET }, from;
	struct epoll_event event = { .events = EPOLLIN };
	int fd = socket(AF_INET, SOCK_DGRAM, 0), instance = epoll_create1(0);
	struct pollfd at = { fd, POLLIN, 0 };
	int polls = !strcmp(way, "poll"), epolls = !strcmp(way, "epoll");
	socklen_t len = sizeof(address);
	char bytes[2048];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	bind(fd, (void *)&address, len);
	getsockname(fd, (void *)&address, &len);
	epoll_ctl(instance, EPOLL_CTL_ADD, fd, &event);
	printf("%d\n", ntohs(address.sin_port));
	fflush(stdout);
	for (;;) {
		ssize_t got;

		if (epolls)
			epoll_wait(instance, &event, 1, -1);
		if (polls)
			poll(&at, 1, -1);
		len = sizeof(from);
		got = recvfrom(fd, bytes, sizeof(bytes), 0, (void *)&from,
			       &len);
		if (got >= 0)
			sendto(fd, bytes, got, 0, (void *)&from, len);
	}
}

/* Starts a server: its clock of CPU time, and a socket that it answers. */
static int start(char *self, char *way, char *library, clockid_t *clock)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int out[2], fd = socket(AF_INET, SOCK_DGRAM, 0), port;
	FILE *says;
	pid_t pid;

	if (pipe(out))
		exit(1);
	pid = fork();
	if (!pid) {
		pin(0);
		dup2(out[1], 1);
		if (library)
			setenv("LD_PRELOAD", library, 1);
		execl(self, self, "server", way, NULL);
		exit(1);
	}
	says = fdopen(out[0], "r");
	if (fscanf(says, "%d", &port) != 1)
		exit(1);
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.sin_port = htons(port);
	connect(fd, (void *)&address, sizeof(address));
	clock_getcpuclockid(pid, clock);
	return fd;
}

static double ask(int fd, clockid_t clock, double ns)
{
	double start = now(clock), end = now(CLOCK_MONOTONIC) + ns;
	long sent = 0, got = 0, most = 0;
	char bytes[64] = "";

	while (got < sent || !most) {
		while (sent - got < WINDOW && (!most || sent < most))
			sent += send(fd, bytes, 32, 0) == 32;
		got += recv(fd, bytes, sizeof(bytes), 0) > 0;
		if (!most && got % 64 == 0 && now(CLOCK_MONOTONIC) >= end)
			most = sent;
	}
	return (now(clock) - start) / got;
}

static int compare(const void *one, const void *other)
{
	double a = *(const double *)one, b = *(const double *)other;

	return (a > b) - (a < b);
}

static double median(double *of, int count)
{
	qsort(of, count, sizeof(*of), compare);
	return count % 2 ? of[count / 2] :
			   (of[count / 2 - 1] + of[count / 2]) / 2;
}

int main(int argc, char **argv)
{
	static double ratios[MOST], drawn[MOST], medians[10000];
	clockid_t clocks[2];
	int fds[2], pairs, above = 0, i, nth;
	double ns, cost[2];

	if (argc > 2 && !strcmp(argv[1], "server"))
		serve(argv[2]);
	if (argc < 5)
		return 2;
	pairs = atoi(argv[3]);
	ns = atof(argv[4]) * 1e6;
	pin(1);
	srand(getpid());
	fds[0] = start(argv[0], argv[1], NULL, &clocks[0]);
	fds[1] = start(argv[0], argv[1], argv[2], &clocks[1]);
	for (i = 0; i < 4; i++)
		ask(fds[i % 2], clocks[i % 2], ns);
	for (i = 0; i < pairs && i < MOST; i++) {
		int first = rand() >> 8 & 1;

		cost[first] = ask(fds[first], clocks[first], ns);
		cost[!first] = ask(fds[!first], clocks[!first], ns);
		ratios[i] = cost[1] / cost[0];
		above += ratios[i] > 1;
		printf("%s %d %.1f %.1f\n", argv[1], i, cost[0], cost[1]);
	}
	for (nth = 0; nth < 10000; nth++) {
		for (i = 0; i < pairs; i++)
			drawn[i] = ratios[rand() % pairs];
		medians[nth] = median(drawn, pairs);
	}
	qsort(medians, 10000, sizeof(*medians), compare);
	printf("# %s: median of %d ratios %.4f, 95 %% interval %.4f to %.4f, %d above one\n",
	       argv[1], pairs, median(ratios, pairs), medians[250],
	       medians[9750], above);
	return 0;
}
