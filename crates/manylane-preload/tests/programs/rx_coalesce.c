/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Do receivers delay before they sleep?
 *
 *	rx_coalesce PATTERN RECEIVERS ROUNDS
 *
 * The main thread sends, and checks in which system call the receivers sleep,
 * until it has seen one in a delay (a ppoll without descriptors, which the
 * program itself never calls), or for ROUNDS rounds. All datagrams are received
 * in either case.
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
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 32
#define RECEIVERS_MAX 8

static int server;
static const char *pattern;
static _Atomic unsigned received, ended;
static _Atomic pid_t tids[RECEIVERS_MAX];

/* Receives all queued datagrams, or waits for one if `flags` is 0. */
static int receive_queued(int flags)
{
	char data[64];
	ssize_t len;

	while ((len = recv(server, data, sizeof(data), flags)) >= 0) {
		if (data[0] == 'S')
			return 1;
		received++;
		if (!flags)
			return 0;
	}
	if (errno != EAGAIN) {
		perror("recv");
		exit(1);
	}
	return 0;
}

static void wait_for(int epoll)
{
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct epoll_event event;
	fd_set set;

	if (!strcmp(pattern, "poll")) {
		poll(&at, 1, -1);
	} else if (!strcmp(pattern, "epoll")) {
		epoll_wait(epoll, &event, 1, -1);
	} else {
		FD_ZERO(&set);
		FD_SET(server, &set);
		select(server + 1, &set, NULL, NULL, NULL);
	}
}

static void *receiver(void *nth)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(0);

	tids[(unsigned long)nth] = (pid_t)syscall(SYS_gettid);
	if (!strcmp(pattern, "block")) {
		while (!receive_queued(0))
			;
	} else {
		epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
		do
			wait_for(epoll);
		while (!receive_queued(MSG_DONTWAIT));
	}
	ended++;
	return NULL;
}

/* True if a thread is in a ppoll without descriptors. */
static int is_delaying(pid_t tid)
{
	char path[64], line[128] = "";
	unsigned long number, fds, count;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", tid);
	file = fopen(path, "r");
	if (!file)
		return 0;
	if (!fgets(line, sizeof(line), file))
		line[0] = 0;
	fclose(file);
	return sscanf(line, "%lu %lx %lx", &number, &fds, &count) == 3 &&
	       number == SYS_ppoll && !fds;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	unsigned receivers, rounds, sent = 0, i;
	int clients[FLOWS], seen = 0;
	pthread_t threads[RECEIVERS_MAX];

	if (argc != 4)
		return 2;
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pattern = argv[1];
	receivers = atoi(argv[2]);
	rounds = atoi(argv[3]);
	if (receivers > RECEIVERS_MAX)
		return 2;
	server = loopback_server(0, &address);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < receivers; i++)
		pthread_create(&threads[i], NULL, receiver,
			       (void *)(unsigned long)i);
	while (rounds-- && !seen) {
		for (i = 0; i < FLOWS; i++) {
			if (sendto(clients[i], "x", 1, 0, (void *)&address,
				   sizeof(address)) != 1)
				perror("sendto");
			sent++;
		}
		/* All of them, so that no queue overflows. */
		while (received < sent) {
			for (i = 0; i < receivers; i++)
				seen |= is_delaying(tids[i]);
			usleep(50);
		}
	}
	for (i = 0; ended < receivers; i++) {
		sendto(clients[i % FLOWS], "S", 1, 0, (void *)&address,
		       sizeof(address));
		usleep(1000);
	}
	for (i = 0; i < receivers; i++)
		pthread_join(threads[i], NULL);
	printf("received %s, delays %s\n", received == sent ? "all" : "not all",
	       seen ? "yes" : "no");
	return 0;
}
