/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Sockets that become plain while threads sleep on their lanes:
 *
 *	fallback_wakeup MODE SOCKETS
 *
 * Three threads with an epoll instance each receive on a socket until the
 * library has seen each return often, and sleep. Then something happens that
 * lanes cannot have. Every datagram that is sent from then on reaches the
 * program's own socket, and has to wake one of them. level, edge: an option is
 * set. shared: the main thread waits on the instances of the others, too. nested:
 * the instances are waited for by poll, from the start. closed: the descriptors
 * that were added are closed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 16
#define WORKERS 3

static int server, clients[FLOWS], epolls[WORKERS], added[WORKERS], nested;
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], total, ended;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		struct epoll_event event;
		char data[64];
		ssize_t len;

		if (nested) {
			struct pollfd at = { .fd = epolls[nth],
					     .events = POLLIN };

			poll(&at, 1, -1);
		}
		epoll_wait(epolls[nth], &event, 1, nested ? 0 : -1);
		while ((len = recv(server, data, sizeof(data), MSG_DONTWAIT)) >=
		       0) {
			if (data[0] == 'S') {
				ended++;
				return NULL;
			}
			received[nth]++;
			total++;
		}
		if (errno != EAGAIN) {
			perror("recv");
			exit(1);
		}
	}
}

/* Sends `count` datagrams, and waits until all are received. */
static void send_some(char what, int count)
{
	static unsigned flow;
	unsigned want = total + count;

	while (count--)
		if (sendto(clients[flow++ % FLOWS], &what, 1, 0,
			   (void *)&address, sizeof(address)) != 1)
			perror("sendto");
	while (what != 'S' && total < want)
		usleep(50);
}

static void make_plain(const char *mode)
{
	struct epoll_event event;
	int one = 1, i;

	if (!strcmp(mode, "shared")) {
		for (i = 0; i < WORKERS; i++)
			epoll_wait(epolls[i], &event, 1, 0);
		return;
	}
	for (i = 0; !strcmp(mode, "closed") && i < WORKERS; i++)
		close(added[i]);
	if (setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &one, sizeof(one))) {
		perror("setsockopt");
	}
}

static void run_socket(const char *mode)
{
	struct epoll_event event = { .events = EPOLLIN };
	pthread_t threads[WORKERS];
	int i, round;

	if (!strcmp(mode, "edge"))
		event.events |= EPOLLET;
	server = loopback_server(0, &address);
	ended = 0;
	for (i = 0; i < WORKERS; i++) {
		received[i] = 0;
		epolls[i] = epoll_create1(EPOLL_CLOEXEC);
		added[i] = strcmp(mode, "closed") ? server : dup(server);
		if (epoll_ctl(epolls[i], EPOLL_CTL_ADD, added[i], &event))
			perror("epoll_ctl");
		pthread_create(&threads[i], NULL, worker,
			       (void *)(unsigned long)i);
	}
	for (round = 0;
	     round < 50 || !received[0] || !received[1] || !received[2];
	     round++)
		send_some('x', FLOWS);
	make_plain(mode);
	for (round = 0; round < 10; round++)
		send_some('x', 1);
	for (round = 0; round < 10; round++)
		send_some('x', FLOWS);
	while (ended < WORKERS) {
		send_some('S', 1);
		usleep(100);
	}
	for (i = 0; i < WORKERS; i++) {
		pthread_join(threads[i], NULL);
		close(epolls[i]);
	}
	close(server);
}

int main(int argc, char **argv)
{
	int i, sockets;

	if (argc != 3)
		return 2;
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sockets = atoi(argv[2]);
	nested = !strcmp(argv[1], "nested");
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < sockets; i++)
		run_socket(argv[1]);
	printf("%d sockets fell back\n", i);
	return 0;
}
