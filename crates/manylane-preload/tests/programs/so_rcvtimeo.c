/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads receive on a UDP socket, until each has had its share. Then its
 * receive timeout becomes negative, with which the kernel does not wait.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/time.h>

#include "loopback.h"

#define FLOWS 16
#define WORKERS 2
/* Datagrams that each has received before the timeout changes. */
#define SHARE_MIN 50

static int server;
static _Atomic unsigned received[WORKERS], ended;
static _Atomic int end;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (!end)
		if (recv(server, &byte, 1, 0) == 1)
			received[nth]++;
	ended++;
	return NULL;
}

static unsigned total(void)
{
	return received[0] + received[1];
}

int main(void)
{
	struct timeval negative = { .tv_sec = -1 }, time = { .tv_sec = 7 };
	int clients[FLOWS], i, result;
	socklen_t len = sizeof(time);
	struct sockaddr_in address;
	pthread_t threads[WORKERS];
	unsigned wanted;
	char byte;

	server = loopback_server(0, &address);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < WORKERS; i++)
		pthread_create(&threads[i], NULL, worker, (void *)(long)i);
	while (!end || ended < WORKERS) {
		end = received[0] >= SHARE_MIN && received[1] >= SHARE_MIN;
		wanted = total() + FLOWS;
		for (i = 0; i < FLOWS; i++)
			sendto(clients[i], "x", 1, 0, (void *)&address,
			       sizeof(address));
		while (total() < wanted && ended < WORKERS)
			usleep(50);
	}
	/* What the threads have left. */
	wait_for_delivery();
	while (recv(server, &byte, 1, MSG_DONTWAIT) == 1)
		;
	result = setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &negative,
			    sizeof(negative));
	printf("set %d, ", result);
	getsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &time, &len);
	printf("is %ld.%06ld, ", (long)time.tv_sec, (long)time.tv_usec);
	errno = 0;
	result = recv(server, &byte, 1, 0);
	printf("recv %d %s, ", result, strerror(errno));
	for (i = 0; i < FLOWS; i++)
		sendto(clients[i], "x", 1, 0, (void *)&address,
		       sizeof(address));
	wait_for_delivery();
	for (i = 0; recv(server, &byte, 1, 0) == 1; i++)
		;
	printf("then %d of %d\n", i, FLOWS);
	return 0;
}
