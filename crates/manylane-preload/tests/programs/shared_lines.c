/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Threads with lanes that answer queued datagrams one after the other, for a trace
 * of their memory accesses:
 *
 *	shared_lines CASE
 *
 * CASE: "wait" receives may block, "nowait" they may not. Stores to `mark` begin
 * and end each batch. The program prints its address first.
 */
#define _GNU_SOURCE
#include <semaphore.h>
#include <stdint.h>
#include <string.h>

#include "warm_up.h"

/* Short, because a thread looks after the other lanes every 20 ms. */
#define BATCH 2
/* The first one is not marked. */
#define BATCHES 25
/* For each worker; about as many for each lane. */
#define ROUNDS (3 * BATCH * BATCHES * WORKERS / FLOWS)

/* A line of its own. */
static struct {
	_Alignas(64) volatile char mark;
	char rest[63];
} area;
static _Atomic unsigned hold, parked, failed;
/* No thread runs while another one is traced. */
static sem_t turns[WORKERS + 1];
static int flags;

static void answer(void)
{
	struct sockaddr_in from;
	char bytes[64];
	struct iovec part = { .iov_base = bytes, .iov_len = sizeof(bytes) };
	struct msghdr message = { .msg_name = &from,
				  .msg_namelen = sizeof(from),
				  .msg_iov = &part,
				  .msg_iovlen = 1 };
	ssize_t len = recvmsg(server, &message, flags);

	part.iov_len = len;
	if (len < 1 || sendmsg(server, &message, 0) != len)
		failed++;
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(uintptr_t)arg;
	char byte;

	while (!hold)
		if (recv(server, &byte, 1, 0) == 1)
			count_received(nth);
	parked++;
	sem_wait(&turns[nth]);
	for (int batch = 0; batch < BATCHES; batch++) {
		if (batch)
			area.mark = 1;
		for (int i = 0; i < BATCH; i++)
			answer();
		if (batch)
			area.mark = 1;
	}
	sem_post(&turns[nth + 1]);
	pause();
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	flags = strcmp(argv[1], "wait") ? MSG_DONTWAIT : 0;
	printf("\naddress of the mark: %lu\n",
	       (unsigned long)(uintptr_t)&area.mark);
	fflush(stdout);
	for (int i = 0; i <= WORKERS; i++)
		sem_init(&turns[i], 0, 0);
	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();
	hold = 1;
	/* Each worker receives one more before it sees that. */
	for (int i = 0; parked < WORKERS; i++) {
		send_one(i % FLOWS, 'x');
		usleep(1000);
	}
	for (int i = 0; i < ROUNDS; i++)
		send_all('y');
	wait_for_delivery();
	sem_post(&turns[0]);
	sem_wait(&turns[WORKERS]);
	_exit(failed ? 1 : 0);
}
