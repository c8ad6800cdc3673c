/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads that share a socket, and which of them has the lane of each flow.
 * For programs that need to know in which queue each datagram is.
 *
 * The program defines handle(), which a worker calls for each datagram.
 */
#ifndef LANE_OWNERS_H
#define LANE_OWNERS_H

#include "loopback.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define FLOWS 16
#define WORKERS 2
/* Datagrams after which the library has seen a thread return often enough. */
#define WARM_UP_DATAGRAMS 200
/*
 * A thread owns a flow if it receives this many of its datagrams in a row.
 * Without that, the other thread may only have been quicker.
 */
#define PROBES_IN_A_ROW 5
/* Attempts to find an owner. Without lanes, any thread may receive any flow. */
#define PROBES_MAX 200

struct payload {
	/* 'l': used to find the owner of a flow */
	char kind;
	unsigned char flow;
	unsigned short number;
	char rest[60];
};

static int server, clients[FLOWS];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], probes_received, last_receiver;
static _Atomic int parked[WORKERS], park[WORKERS];
/* The worker whose lane each flow is in. */
static unsigned owner[FLOWS];

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from);

/* A sleep that the library does not see. */
static inline void raw_sleep(void)
{
	struct timespec time = { 0, 200000 };

	syscall(SYS_nanosleep, &time, NULL);
}

static inline void send_one(char kind, int flow, unsigned short number)
{
	struct payload payload = { .kind = kind,
				   .flow = flow,
				   .number = number };

	if (sendto(clients[flow], &payload, sizeof(payload), 0,
		   (void *)&address, sizeof(address)) != sizeof(payload)) {
		perror("sendto");
		exit(1);
	}
}

static inline void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		struct payload payload;
		struct sockaddr_in from;
		socklen_t len = sizeof(from);

		if (parked[nth]) {
			while (park[nth])
				raw_sleep();
			parked[nth] = 0;
		}
		if (recvfrom(server, &payload, sizeof(payload), 0,
			     (void *)&from, &len) != sizeof(payload)) {
			perror("recvfrom");
			exit(1);
		}
		received[nth]++;
		if (payload.kind != 'l') {
			handle(nth, &payload, &from);
			continue;
		}
		/*
		 * Sleeps in the work keep all threads active, so both receive
		 * some.
		 */
		raw_sleep();
		last_receiver = nth;
		/*
		 * Before it is counted: then no more is sent to park it. Only
		 * here, because a thread that parks without a probe may leave
		 * the one that was sent to park it.
		 */
		if (park[nth])
			parked[nth] = 1;
		probes_received++;
	}
}

/* Sends a probe, and waits until it is received; returns the receiver. */
static inline unsigned probe_flow(int flow)
{
	unsigned before = probes_received;

	send_one('l', flow, 0);
	while (probes_received == before)
		raw_sleep();
	/* By now the receiver waits again. */
	raw_sleep();
	raw_sleep();
	return last_receiver;
}

/* Finds the worker that has the lane of a flow; false if none has. */
static inline int find_owner(int flow)
{
	unsigned worker_index, tries, row = 0;

	for (tries = 0; row < PROBES_IN_A_ROW && tries < PROBES_MAX; tries++) {
		worker_index = probe_flow(flow);
		row = worker_index == owner[flow] ? row + 1 : 1;
		owner[flow] = worker_index;
	}
	return row == PROBES_IN_A_ROW;
}

/* The same for all flows; each thread gets some. */
static inline int find_owners(void)
{
	unsigned of_first, tries;
	int i;

	for (i = of_first = 0; i < FLOWS; i++) {
		if (!find_owner(i))
			return 0;
		of_first += owner[i] == 0;
	}
	/* Another flow may be in the other lane. */
	for (tries = 0; of_first % FLOWS == 0 && tries < PROBES_MAX; tries++) {
		close(clients[0]);
		clients[0] = socket(AF_INET, SOCK_DGRAM, 0);
		if (!find_owner(0))
			return 0;
		of_first = owner[0] == owner[1] ? of_first : 1;
	}
	return of_first % FLOWS != 0;
}

/* Starts the workers. When this returns, both have lanes and are parked. */
static inline void start_and_park(void)
{
	unsigned nth, sent;
	pthread_t thread;
	int i, known;

	server = loopback_server(0, &address);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (nth = 0; nth < WORKERS; nth++)
		pthread_create(&thread, NULL, worker, (void *)(long)nth);
	do {
		for (i = 0, sent = probes_received; i < FLOWS; i++)
			send_one('l', i, 0);
		while (probes_received != sent + FLOWS)
			raw_sleep();
	} while (received[0] < WARM_UP_DATAGRAMS ||
		 received[1] < WARM_UP_DATAGRAMS);
	known = find_owners();
	/* Then the owner does not matter. */
	for (i = 0; !known && i < FLOWS; i++)
		owner[i] = i % WORKERS;
	for (nth = 0; nth < WORKERS; nth++) {
		park[nth] = 1;
		/*
		 * One probe is in flight at a time, so that none is left. In
		 * the end of any flow, because a worker that was held up may
		 * own others than were found.
		 */
		for (i = 0; !parked[nth]; i++)
			if (owner[i % FLOWS] == nth || !known || i >= FLOWS)
				probe_flow(i % FLOWS);
	}
}

/* The `nth` flow of a worker. */
static inline int nth_flow(unsigned worker_index, int nth)
{
	int i;

	for (i = 0;; i = (i + 1) % FLOWS)
		if (owner[i] == worker_index && nth-- == 0)
			return i;
}

#endif
