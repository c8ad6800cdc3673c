/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server whose lanes have descriptors above FD_SETSIZE, and that then lowers
 * its limit of open files to 0. Two threads have lanes, and are parked. The main
 * thread polls the socket by select while all lanes are empty, and then receives
 * one datagram each time that select reports one. Prints how often select
 * reported a datagram that was not there, and how many were received.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/select.h>

#define EACH 5
#define DATAGRAMS (EACH * FLOWS)
#define POLLS 20
/* Descriptors that the program has: the library takes numbers beyond them. */
#define FD_MIN 100
#define FD_MAX 1100

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)payload, (void)from;
}

static int is_reported(void)
{
	struct timeval time = { 0, 0 };
	fd_set set;
	int count;

	FD_ZERO(&set);
	FD_SET(server, &set);
	count = select(server + 1, &set, NULL, NULL, &time);
	if (count < 0)
		printf("select: %s\n", strerrorname_np(errno));
	return count > 0;
}

static int is_received(void)
{
	struct payload payload;

	return recv(server, &payload, sizeof(payload), MSG_DONTWAIT) ==
	       sizeof(payload);
}

int main(void)
{
	struct rlimit limit;
	int i, null = open("/dev/null", O_RDONLY), vain = 0, got = 0;

	alarm(300);
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max < 8192 ? limit.rlim_max : 8192;
	setrlimit(RLIMIT_NOFILE, &limit);
	for (i = FD_MIN; i <= FD_MAX; i++)
		if (dup2(null, i) < 0)
			perror("dup2");
	start_and_park();
	limit.rlim_cur = 0;
	setrlimit(RLIMIT_NOFILE, &limit);
	for (i = 0; i < POLLS; i++)
		vain += is_reported();
	for (i = 0; i < DATAGRAMS; i++)
		send_one('x', i % FLOWS, i);
	while (got < DATAGRAMS && vain <= DATAGRAMS)
		if (is_reported()) {
			if (is_received())
				got++;
			else
				vain++;
		}
	printf("%d in vain, %d of %d\n", vain, got, DATAGRAMS);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
