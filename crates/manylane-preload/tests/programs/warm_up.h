/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads that receive on one socket until the library has seen both return
 * often. Both have lanes then, if there are any.
 *
 * The program opens `server`, and defines worker(), which calls count_received()
 * after each receive.
 */
#ifndef WARM_UP_H
#define WARM_UP_H

#include "loopback.h"

#include <pthread.h>
#include <stdatomic.h>

#define FLOWS 32
#define WORKERS 2
#define WARM_UP_DATAGRAMS 50

static int server, clients[FLOWS];
static struct sockaddr_in address;
static pthread_t workers[WORKERS];
static _Atomic unsigned received[WORKERS], total;

static void *worker(void *arg);

static inline void count_received(unsigned nth)
{
	received[nth]++;
	total++;
}

/* A worker's receives: until the socket ends, or "e" arrives. */
static inline void receive_all(unsigned nth)
{
	char byte;

	while (recv(server, &byte, 1, 0) == 1 && byte != 'e')
		count_received(nth);
}

static inline void open_clients(void)
{
	for (int i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
}

static inline void send_one(int flow, char byte)
{
	if (sendto(clients[flow], &byte, 1, 0, (void *)&address,
		   sizeof(address)) != 1)
		perror("sendto");
}

/* Sends a datagram of each flow. */
static inline void send_all(char byte)
{
	for (int i = 0; i < FLOWS; i++)
		send_one(i, byte);
}

/* The same, and waits until the workers have received all. */
static inline void send_all_and_wait(char byte)
{
	unsigned want = total + FLOWS;

	send_all(byte);
	while (total < want)
		usleep(50);
}

static inline void start_worker(unsigned long nth)
{
	pthread_create(&workers[nth], NULL, worker, (void *)nth);
}

static inline void warm_up(void)
{
	while (received[0] < WARM_UP_DATAGRAMS ||
	       received[1] < WARM_UP_DATAGRAMS)
		send_all_and_wait('x');
}

static inline void start_and_warm_up(void)
{
	for (int i = 0; i < WORKERS; i++)
		start_worker(i);
	warm_up();
}

#endif
