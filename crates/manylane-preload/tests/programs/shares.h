/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads that share a socket, and which of them has the lane of a flow:
 * for programs that know to the datagram what is in whose queue.
 *
 * The program defines handle(), which a worker calls for each datagram.
 */
#ifndef SHARES_H
#define SHARES_H

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
/* Datagrams after which a thread has come back often enough for anything. */
#define OFTEN 200
/* So often in a row a thread has those of a flow that is in its lane: now and
 * then the other one is quicker.
 */
#define SURE 5
/* Without lanes anybody has any flow: so often it is tried to learn who is who. */
#define TRIES 200

struct word {
	/* 'l': one of those by which the program learns who is who. */
	char kind;
	unsigned char flow;
	unsigned short number;
	char rest[60];
};

static int server, clients[FLOWS];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], learnt, taker;
static _Atomic int parked[WORKERS], park[WORKERS];
/* The worker whose lane a flow is in. */
static unsigned owner[FLOWS];

static void handle(unsigned nth, const struct word *word,
		   const struct sockaddr_in *from);

/* A sleep that the library does not know of. */
static inline void nap(void)
{
	struct timespec time = { 0, 200000 };

	syscall(SYS_nanosleep, &time, NULL);
}

static inline void send_one(char kind, int flow, unsigned short number)
{
	struct word word = { .kind = kind, .flow = flow, .number = number };

	if (sendto(clients[flow], &word, sizeof(word), 0, (void *)&address,
		   sizeof(address)) != sizeof(word)) {
		perror("sendto");
		exit(1);
	}
}

static inline void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		struct word word;
		struct sockaddr_in from;
		socklen_t len = sizeof(from);

		if (park[nth]) {
			parked[nth] = 1;
			while (park[nth])
				nap();
			parked[nth] = 0;
		}
		if (recvfrom(server, &word, sizeof(word), 0, (void *)&from,
			     &len) != sizeof(word)) {
			perror("recvfrom");
			exit(1);
		}
		received[nth]++;
		if (word.kind != 'l') {
			handle(nth, &word, &from);
			continue;
		}
		/* Sleeps in their work: nobody rests, and both get some. */
		nap();
		taker = nth;
		learnt++;
	}
}

/* Sends one to learn by, and waits until somebody has it: who. */
static inline unsigned learn_one(int flow)
{
	unsigned before = learnt;

	send_one('l', flow, 0);
	while (learnt == before)
		nap();
	/* Whoever it was waits again. */
	nap();
	nap();
	return taker;
}

/* Who has the lane of a flow; false if nobody has. */
static inline int learn_owner(int flow)
{
	unsigned who, tries, row = 0;

	for (tries = 0; row < SURE && tries < TRIES; tries++) {
		who = learn_one(flow);
		row = who == owner[flow] ? row + 1 : 1;
		owner[flow] = who;
	}
	return row == SURE;
}

/* The same for all flows; each thread gets some. */
static inline int learn_owners(void)
{
	unsigned of_first, tries;
	int i;

	for (i = of_first = 0; i < FLOWS; i++) {
		if (!learn_owner(i))
			return 0;
		of_first += owner[i] == 0;
	}
	/* Another flow may be in the other lane. */
	for (tries = 0; of_first % FLOWS == 0 && tries < TRIES; tries++) {
		close(clients[0]);
		clients[0] = socket(AF_INET, SOCK_DGRAM, 0);
		if (!learn_owner(0))
			return 0;
		of_first = owner[0] == owner[1] ? of_first : 1;
	}
	return of_first % FLOWS != 0;
}

/* Starts the workers; both have lanes, and are parked, when this returns. */
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
		for (i = 0, sent = learnt; i < FLOWS; i++)
			send_one('l', i, 0);
		while (learnt != sent + FLOWS)
			nap();
	} while (received[0] < OFTEN || received[1] < OFTEN);
	known = learn_owners();
	/* Then it does not matter. */
	for (i = 0; !known && i < FLOWS; i++)
		owner[i] = i % WORKERS;
	for (nth = 0; nth < WORKERS; nth++) {
		park[nth] = 1;
		/* One is on its way at a time, so that none is left. */
		for (i = 0; !parked[nth]; i = (i + 1) % FLOWS)
			if (owner[i] == nth || !known)
				learn_one(i);
	}
}

/* Any flow of a worker's, the `nth` one. */
static inline int flow_of(unsigned who, int nth)
{
	int i;

	for (i = 0;; i = (i + 1) % FLOWS)
		if (owner[i] == who && nth-- == 0)
			return i;
}

#endif
