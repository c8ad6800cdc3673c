/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Epoll instances that are polled as descriptors, while lanes hold datagrams:
 *
 *	nested_epoll CALL [edge|late|blocked|one|seccomp]
 *
 * Four threads receive on a socket in turn until each may have a lane, and then
 * stay away. FLOWS flows send, and the main thread waits without a timeout for
 * the instance that the socket is in, by CALL: poll, ppoll, select, pselect or
 * epoll (another instance). It receives one datagram each time, or all of them
 * with edge. late: the instance is polled before the socket is added to it.
 * blocked: another thread waits while the socket is added. one: the instance is
 * asked for one event at a time. seccomp: the program installs a seccomp filter
 * after it has polled the instance.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 16
#define WORKERS 4
#define ROUNDS 10
#define DATA 0x123456789abcdefULL
#define OUTER 0xfedcba987654321ULL

static int server, inner, outer = -1, clients[FLOWS];
static struct sockaddr_in address;
static sem_t may_receive[WORKERS], done;
static int datagrams_each;

static void check(int fine, const char *what)
{
	if (!fine) {
		perror(what);
		exit(1);
	}
}

static int receive(void)
{
	char data[64];
	ssize_t len = recv(server, data, sizeof(data), MSG_DONTWAIT);

	check(len == 1 || (len < 0 && errno == EAGAIN), "recv");
	return len == 1;
}

static void *worker(void *semaphore)
{
	int left;

	for (;;) {
		sem_wait(semaphore);
		for (left = datagrams_each; left; left -= receive())
			;
		sem_post(&done);
	}
	return NULL;
}

static void send_all(void)
{
	int i;

	for (i = 0; i < FLOWS; i++)
		check(sendto(clients[i], "x", 1, 0, (void *)&address,
			     sizeof(address)) == 1,
		      "sendto");
}

static void receive_in_turn(int datagrams)
{
	int i;

	datagrams_each = datagrams;
	for (i = 0; i < WORKERS; i++) {
		sem_post(&may_receive[i]);
		sem_wait(&done);
	}
}

/*
 * True if the instance is reported within `ms` milliseconds; -1 is no timeout.
 */
static int wait_for(const char *call, int ms)
{
	struct timespec time = { 0, 0 };
	struct timeval short_time = { 0, 0 };
	struct pollfd at = { .fd = inner, .events = POLLIN };
	struct epoll_event event;
	fd_set set;
	int found;

	FD_ZERO(&set);
	FD_SET(inner, &set);
	if (!strcmp(call, "poll"))
		found = poll(&at, 1, ms);
	else if (!strcmp(call, "ppoll"))
		found = ppoll(&at, 1, ms ? NULL : &time, NULL);
	else if (!strcmp(call, "select"))
		found = select(inner + 1, &set, NULL, NULL,
			       ms ? NULL : &short_time);
	else if (!strcmp(call, "pselect"))
		found = pselect(inner + 1, &set, NULL, NULL, ms ? NULL : &time,
				NULL);
	else {
		found = epoll_wait(outer, &event, 1, ms);
		check(found < 1 || event.data.u64 == OUTER, "data");
	}
	check(found >= 0, "wait");
	return found;
}

static void *wait_blocked(void *call)
{
	printf("a blocked wait: %d\n", wait_for(call, -1));
	return NULL;
}

static void add(const char *what)
{
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = DATA };

	if (!strcmp(what, "edge"))
		event.events |= EPOLLET;
	check(!epoll_ctl(inner, EPOLL_CTL_ADD, server, &event), "epoll_ctl");
}

/* Installs a filter that allows everything. */
static void confine(void)
{
	struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog filter = { 1, &allow };

	check(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges");
	check(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), "filter");
}

int main(int argc, char **argv)
{
	const char *call = argc > 1 ? argv[1] : "",
		   *what = argc > 2 ? argv[2] : "";
	int received = 0, reported = 0, round, i, got;
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = OUTER };
	struct epoll_event events[8];
	int room = strcmp(what, "one") ? 8 : 1;
	pthread_t thread;

	/* A wait that never ends fails the test. */
	alarm(300);
	setvbuf(stdout, NULL, _IONBF, 0);
	server = loopback_server(0, &address);
	inner = epoll_create1(EPOLL_CLOEXEC);
	sem_init(&done, 0, 0);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < WORKERS; i++) {
		sem_init(&may_receive[i], 0, 0);
		pthread_create(&thread, NULL, worker, &may_receive[i]);
	}
	if (strcmp(what, "late") && strcmp(what, "blocked"))
		add(what);
	for (round = 0; round < ROUNDS; round++) {
		send_all();
		receive_in_turn(FLOWS / WORKERS);
	}
	/* Some may be prefetched by receives of one datagram. */
	send_all();
	send_all();
	receive_in_turn(1);

	if (!strcmp(call, "epoll")) {
		outer = epoll_create1(EPOLL_CLOEXEC);
		check(!epoll_ctl(outer, EPOLL_CTL_ADD, inner, &event), "outer");
	}
	if (!strcmp(what, "late")) {
		printf("before: %d\n", wait_for(call, 0));
		add(what);
	} else if (!strcmp(what, "blocked")) {
		pthread_create(&thread, NULL, wait_blocked, (void *)call);
		add(what);
		pthread_join(thread, NULL);
	}
	if (!strcmp(what, "seccomp")) {
		check(wait_for(call, -1) == 1, "before the filter");
		confine();
	}
	while (received < 2 * FLOWS - WORKERS) {
		reported += wait_for(call, -1);
		/* Each time, until the instance is queried. */
		check(wait_for(call, 0) == 1, "reported again");
		got = epoll_wait(inner, events, room, -1);
		if (got != 1 || events[0].events != EPOLLIN ||
		    events[0].data.u64 != DATA) {
			printf("%d events\n", got);
			return 1;
		}
		do {
			got = receive();
			received += got;
		} while (got && !strcmp(what, "edge"));
	}
	printf("reported %d times, received %d\n", reported, received);
	printf("then %d, %d, %d\n", wait_for(call, 0),
	       epoll_wait(inner, events, room, 0), receive());
	send_all();
	printf("later %d, ", wait_for(call, -1));
	printf("%d\n", epoll_wait(inner, events, room, 0));
	return 0;
}
