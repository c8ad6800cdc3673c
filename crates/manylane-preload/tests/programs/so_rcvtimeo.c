/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads receive on a UDP socket, until both have received often. Then its
 * receive timeout becomes negative, with which the kernel does not wait.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/time.h>

#include "warm_up.h"

static _Atomic unsigned end, ended;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (!end)
		if (recv(server, &byte, 1, 0) == 1)
			count_received(nth);
	ended++;
	return NULL;
}

int main(void)
{
	struct timeval negative = { .tv_sec = -1 }, time = { .tv_sec = 7 };
	socklen_t len = sizeof(time);
	int i, result;
	char byte;

	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();
	pin_to_this_cpu();
	end = 1;
	while (ended < WORKERS) {
		send_all('x');
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
	send_all('x');
	wait_for_delivery();
	for (i = 0; recv(server, &byte, 1, 0) == 1; i++)
		;
	printf("then %d of %d\n", i, FLOWS);
	return 0;
}
