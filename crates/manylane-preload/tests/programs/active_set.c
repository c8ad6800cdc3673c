/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Threads that share one CPU, and one socket:
 *
 *	active_set WORK PATTERN
 *
 * Four threads answer requests. WORK is the work for each: "none": nothing.
 * "sleep": a sleep. "later": nothing at first, and later a sleep. The main
 * thread sends requests from many ports, one at a time or many at once, and
 * records which thread answers.
 *
 * Prints whether one thread answered all requests for a while (each thread in
 * turn, for "none"), after how many requests, and how many followed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
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

#define THREADS 4
#define FLOWS 64
/*
 * Answers of one thread in a row: all flows, twice. If each thread has a lane,
 * they are never all from one thread.
 */
#define ANSWERS_IN_A_ROW (2 * FLOWS)
#define REQUESTS_MAX 4000
#define SLEEP_US 500
/* For an answer: a thread may get no CPU time for long. */
#define TIMEOUT_MS 100000

static int server;
static const char *pattern;
static _Atomic int sleeps;
static _Atomic unsigned ended;

static int answer(unsigned char number)
{
	struct sockaddr_in from;
	socklen_t fromlen = sizeof(from);
	char data[64];
	ssize_t len = recvfrom(server, data, sizeof(data), 0, (void *)&from,
			       &fromlen);

	if (len < 0) {
		if (errno == EAGAIN || errno == EINTR)
			return 0;
		perror("recvfrom");
		exit(1);
	}
	if (data[0] == 'S')
		return 1;
	if (sleeps)
		usleep(SLEEP_US);
	if (sendto(server, &number, 1, 0, (void *)&from, fromlen) != 1) {
		perror("sendto");
		exit(1);
	}
	return 0;
}

static void *serve(void *number)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(0);

	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	do {
		if (strcmp(pattern, "block"))
			epoll_wait(epoll, &event, 1, -1);
	} while (!answer((unsigned char)(unsigned long)number));
	close(epoll);
	ended++;
	return NULL;
}

/* Returns the thread that answered. */
static int wait_for_answer(int client)
{
	unsigned char who;
	struct pollfd at = { .fd = client, .events = POLLIN };

	if (poll(&at, 1, TIMEOUT_MS) != 1 || recv(client, &who, 1, 0) != 1) {
		printf("no answer\n");
		exit(1);
	}
	return who;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address;
	unsigned i, flow, streak = 0, before = 0, after = 0, streaked = 0;
	int clients[FLOWS], who, last = -1, requests = REQUESTS_MAX, seen = 0;
	int each = !strcmp(argc == 3 ? argv[1] : "", "none");
	pthread_t threads[THREADS];
	cpu_set_t one;

	if (argc != 3)
		return 2;
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* The first available CPU. */
	sched_getaffinity(0, sizeof(one), &one);
	for (i = 0; !CPU_ISSET(i, &one); i++)
		;
	CPU_ZERO(&one);
	CPU_SET(i, &one);
	sched_setaffinity(0, sizeof(one), &one);

	pattern = argv[2];
	sleeps = !strcmp(argv[1], "sleep");
	server = loopback_server(strcmp(pattern, "block") ? SOCK_NONBLOCK : 0,
				 &address);
	for (i = 0; i < FLOWS; i++) {
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
		if (connect(clients[i], (void *)&address, sizeof(address)))
			return 1;
	}
	for (i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, serve,
			       (void *)(unsigned long)i);

	/* One at a time. With "none", all threads are waited for. */
	for (flow = 0; !seen && (!sleeps || before < (unsigned)requests);
	     flow++) {
		send(clients[flow % FLOWS], "x", 1, 0);
		who = wait_for_answer(clients[flow % FLOWS]);
		streak = who == last ? streak + 1 : 1;
		last = who;
		if (streak >= ANSWERS_IN_A_ROW)
			streaked |= 1u << who;
		seen = each ? streaked == (1u << THREADS) - 1 : streaked != 0;
		before++;
	}
	if (!strcmp(argv[1], "later"))
		sleeps = 1;
	/* Many at once. */
	while (requests > 0) {
		for (i = 0; i < FLOWS; i++)
			send(clients[i], "x", 1, 0);
		for (i = 0; i < FLOWS; i++)
			wait_for_answer(clients[i]);
		requests -= FLOWS;
		after += FLOWS;
	}
	for (i = 0; ended < THREADS; i++) {
		send(clients[i % FLOWS], "S", 1, 0);
		usleep(1000);
	}
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	printf("%s %u %u\n", seen ? "one" : "all", before, after);
	return 0;
}
