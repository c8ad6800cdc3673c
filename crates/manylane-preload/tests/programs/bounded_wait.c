/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A process receives alone. A second one joins, and is killed when waits have a
 * bound, but the mode of the socket is still that of a single receiver. Then the
 * first one waits for longer than the bound: its receive must not end before a
 * datagram arrives.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "loopback.h"

/* Some of the library's bounds, which are 20 ms. */
#define PAUSE_US 100000

static int client;
static struct sockaddr_in address;

static void send_one(void)
{
	if (sendto(client, "x", 1, 0, (void *)&address, sizeof(address)) != 1)
		perror("sendto");
}

static void *send_later(void *arg)
{
	usleep(PAUSE_US);
	send_one();
	return arg;
}

int main(void)
{
	int server = loopback_server(0, &address), ready[2], i, status = 0;
	pid_t self = getpid(), child;
	pthread_t sender;
	ssize_t got;
	char byte;

	client = socket(AF_INET, SOCK_DGRAM, 0);
	if (client < 0 || pipe(ready))
		return 1;
	child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != self || read(ready[0], &byte, 1) != 1)
			_exit(1);
		recv(server, &byte, 1, 0);
		_exit(2);
	}
	for (i = 0; i < 5; i++) {
		send_one();
		if (recv(server, &byte, 1, 0) != 1)
			perror("recv");
	}
	if (write(ready[1], "x", 1) != 1 || waitpid(child, &status, 0) != child)
		perror("child");
	pthread_create(&sender, NULL, send_later, NULL);
	got = recv(server, &byte, 1, 0);
	printf("killed: %s, received: %s\n",
	       WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL ? "yes" :
								    "no",
	       got == 1 ? "yes" : strerror(errno));
	pthread_join(sender, NULL);
	return 0;
}
