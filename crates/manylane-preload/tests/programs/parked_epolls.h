/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads that wait for one socket, each on an epoll instance of its own,
 * until both have received often. Then they park where the library does not see
 * it.
 */
#ifndef PARKED_EPOLLS_H
#define PARKED_EPOLLS_H

#include "warm_up.h"

#include <sys/epoll.h>

static int instances[WORKERS];
static _Atomic unsigned parked, hold;

/* A sleep that the library does not see. */
static void raw_sleep(void)
{
	struct timespec time = { 0, 200000 };

	syscall(SYS_nanosleep, &time, NULL);
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	struct epoll_event event;
	char byte;

	for (;;) {
		if (epoll_wait(instances[nth], &event, 1, -1) != 1)
			continue;
		while (recv(server, &byte, 1, MSG_DONTWAIT) == 1)
			count_received(nth);
		if (!hold)
			continue;
		parked++;
		for (;;)
			raw_sleep();
	}
	return NULL;
}

static inline void warm_up_and_park(void)
{
	struct epoll_event event = { .events = EPOLLIN };

	server = loopback_server(SOCK_NONBLOCK, &address);
	open_clients();
	for (int i = 0; i < WORKERS; i++) {
		instances[i] = epoll_create1(EPOLL_CLOEXEC);
		epoll_ctl(instances[i], EPOLL_CTL_ADD, server, &event);
	}
	start_and_warm_up();
	/* For wait_for_delivery(). */
	pin_to_this_cpu();
	hold = 1;
	while (parked < WORKERS) {
		send_all('x');
		usleep(50);
	}
}

#endif
