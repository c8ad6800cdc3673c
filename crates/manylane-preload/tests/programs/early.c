/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server with one receiver forks, while datagrams come at the very moment at
 * which the library makes lanes for its children: none of them may get lost.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SENDERS 64

static int senders[SENDERS];
static struct sockaddr_in server;

static void send_all(int round)
{
	unsigned char number[2] = { 0, (unsigned char)round };

	for (int i = 0; i < SENDERS; i++) {
		number[0] = (unsigned char)i;
		if (sendto(senders[i], number, sizeof(number), 0,
			   (struct sockaddr *)&server, sizeof(server)) < 0)
			_exit(2);
	}
}

static void rush(void)
{
	send_all(1);
}

/* Each datagram that is there, once: how many of the given round. */
static int receive_all(int fd, int round, const char *way)
{
	unsigned char seen[SENDERS] = { 0 };
	unsigned char got[16];
	int count = 0, size;

	for (;;) {
		struct pollfd at = { .fd = fd, .events = POLLIN };
		int ready = poll(&at, 1, 0);

		size = 0;
		ioctl(fd, FIONREAD, &size);
		if (ready == 0) {
			if (recv(fd, got, sizeof(got), MSG_DONTWAIT) >= 0)
				printf("%s: something that poll did not see\n",
				       way);
			return count;
		}
		if (size != 2)
			printf("%s: FIONREAD says %d\n", way, size);
		if (recv(fd, got, sizeof(got), MSG_DONTWAIT) != 2 ||
		    got[0] >= SENDERS || got[1] != round || seen[got[0]]++)
			return -1;
		count++;
	}
}

int main(int argc, char **argv)
{
	void (**after_bind)(void) = dlsym(RTLD_DEFAULT, "rush_after_bind");
	socklen_t len = sizeof(server);
	int fd = socket(AF_INET, SOCK_DGRAM, 0), before, early, later;
	pid_t child;

	server.sin_family = AF_INET;
	server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	bind(fd, (struct sockaddr *)&server, len);
	getsockname(fd, (struct sockaddr *)&server, &len);
	for (int i = 0; i < SENDERS; i++)
		senders[i] = socket(AF_INET, SOCK_DGRAM, 0);
	send_all(0);
	before = receive_all(fd, 0, "before");
	if (argc > 1 && !strcmp(argv[1], "rush") && after_bind)
		*after_bind = rush;
	else
		rush();
	child = fork();
	if (child == 0)
		_exit(0);
	waitpid(child, NULL, 0);
	early = receive_all(fd, 1, "early");
	send_all(2);
	later = receive_all(fd, 2, "later");
	printf("%d before, %d early, %d later\n", before, early, later);
	return 0;
}
