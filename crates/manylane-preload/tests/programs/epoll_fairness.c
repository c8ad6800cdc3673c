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
#include "loopback.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <signal.h>

#define SOCKETS 2
#define WORKERS 2
#define FLOWS 32
#define WARM_UP_DATAGRAMS 50
#define BURSTS 3
/* Waits, in which each is reported at least once. */
#define WAITS 100
#define ROUNDS 3

static int servers[SOCKETS], clients[FLOWS];
static struct sockaddr_in addresses[SOCKETS];
static _Atomic unsigned received[SOCKETS][WORKERS], total, parked, hold;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (recv(servers[nth / WORKERS], &byte, 1, 0) == 1) {
		received[nth / WORKERS][nth % WORKERS]++;
		total++;
		if (!hold)
			continue;
		parked++;
		for (;;)
			pause();
	}
	return NULL;
}

static void send_one(int at, int flow)
{
	if (sendto(clients[flow], "x", 1, 0, (void *)&addresses[at],
		   sizeof(addresses[at])) != 1)
		perror("sendto");
}

static void send_all(int at)
{
	for (int i = 0; i < FLOWS; i++)
		send_one(at, i);
}

/* Waits until both threads have lanes and stay away. */
static void warm_up_and_park(unsigned at)
{
	pthread_t thread;

	servers[at] = loopback_server(0, &addresses[at]);
	hold = parked = 0;
	for (unsigned long i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker,
			       (void *)(at * WORKERS + i));
	while (received[at][0] < WARM_UP_DATAGRAMS ||
	       received[at][1] < WARM_UP_DATAGRAMS) {
		unsigned want = total + FLOWS;

		send_all(at);
		while (total < want)
			usleep(50);
	}
	hold = 1;
	for (int i = 0; parked < WORKERS; i++) {
		send_one(at, i % FLOWS);
		usleep(1000);
	}
}

int main(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(0), pipes[2];

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (unsigned i = 0; i < SOCKETS; i++)
		warm_up_and_park(i);
	pin_to_this_cpu();
	for (unsigned i = 0; i < SOCKETS; i++) {
		for (int round = 0; round < BURSTS; round++)
			send_all(i);
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
