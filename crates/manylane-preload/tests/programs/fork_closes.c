/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads wait for one socket, each on an epoll instance of its own, until
 * both have received often. Then a child of a fork closes the socket, as a
 * program does that is about to execute another one. What the instances watch
 * stays, because the parent still has the socket.
 *
 * Prints how many instances watch something else than the socket itself, and
 * how many have changed.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>

static int instances[WORKERS];
static _Atomic unsigned parked, hold;

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
			pause();
	}
	return NULL;
}

/* The descriptor that an instance watches. */
static int watched(int instance)
{
	char path[64], line[256];
	int fd = -1;
	FILE *info;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", instance);
	info = fopen(path, "r");
	while (info && fgets(line, sizeof(line), info))
		sscanf(line, "tfd: %d", &fd);
	fclose(info);
	return fd;
}

int main(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int before[WORKERS], lanes = 0, changed = 0;
	pid_t child;

	server = loopback_server(SOCK_NONBLOCK, &address);
	open_clients();
	for (int i = 0; i < WORKERS; i++) {
		instances[i] = epoll_create1(0);
		epoll_ctl(instances[i], EPOLL_CTL_ADD, server, &event);
	}
	start_and_warm_up();
	hold = 1;
	while (parked < WORKERS) {
		send_all('x');
		usleep(50);
	}
	for (int i = 0; i < WORKERS; i++) {
		before[i] = watched(instances[i]);
		lanes += before[i] != server;
	}
	child = fork();
	if (!child) {
		close(server);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	for (int i = 0; i < WORKERS; i++)
		changed += watched(instances[i]) != before[i];
	printf("lanes: %d, changed: %d\n", lanes, changed);
	return 0;
}
