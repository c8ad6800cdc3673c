/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An epoll instance that is asked for one event at a time, with two sockets and
 * a pipe that always have one.
 *
 * Two threads receive on each socket until the library has seen both return
 * often, and then stay away, with their lanes. Datagrams arrive for all of
 * them, and none is received. Prints how many of the three are reported,
 * repeatedly.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <sys/epoll.h>
#include <sys/prctl.h>
#include <signal.h>

#define SOCKETS 2
#define BURSTS 3
/* Waits, in which each is reported at least once. */
#define WAITS 100
#define ROUNDS 3

static _Atomic unsigned parked, hold;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	int fd = server;
	char byte;

	while (recv(fd, &byte, 1, 0) == 1) {
		count_received(nth);
		if (!hold)
			continue;
		parked++;
		for (;;)
			pause();
	}
	return NULL;
}

/* Opens a socket. When this returns, two threads have its lanes and stay away. */
static void open_and_park(void)
{
	server = loopback_server(0, &address);
	hold = parked = 0;
	received[0] = received[1] = 0;
	start_and_warm_up();
	hold = 1;
	for (int i = 0; parked < WORKERS; i++) {
		send_one(i % FLOWS, 'x');
		usleep(1000);
	}
}

int main(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(0), pipes[2], servers[SOCKETS];
	struct sockaddr_in addresses[SOCKETS];

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	open_clients();
	for (int i = 0; i < SOCKETS; i++) {
		open_and_park();
		servers[i] = server;
		addresses[i] = address;
	}
	pin_to_this_cpu();
	for (unsigned i = 0; i < SOCKETS; i++) {
		address = addresses[i];
		for (int round = 0; round < BURSTS; round++)
			send_all('x');
		event.data.u32 = i;
		epoll_ctl(epoll, EPOLL_CTL_ADD, servers[i], &event);
	}
	wait_for_delivery();
	if (pipe(pipes))
		return 1;
	event = (struct epoll_event){ .events = EPOLLOUT, .data.u32 = SOCKETS };
	epoll_ctl(epoll, EPOLL_CTL_ADD, pipes[1], &event);
	for (int round = 0; round < ROUNDS; round++) {
		unsigned reported = 0;

		for (int i = 0; i < WAITS; i++)
			if (epoll_wait(epoll, &event, 1, -1) == 1)
				reported |= 1u << event.data.u32;
		printf("%d\n", __builtin_popcount(reported));
	}
	fflush(stdout);
	_exit(0);
}
