/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server with one receiver forks, while datagrams come at the very moment at
 * which the library makes lanes for its children: none of them may get lost.
 *
 *	early WAY
 *
 * calm: they come before; rush: in that moment; late: so they do to a socket
 * that is the 5000th of its process; asleep: they do, and the receiver is
 * another thread, which sleeps in a receive, and is to be woken by each.
 */
#define _GNU_SOURCE
#include "loopback.h"

#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/ioctl.h>
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

	settle();
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

static atomic_int received, tid;

static void *sleeper(void *arg)
{
	unsigned char got[16];

	tid = gettid();
	while (recv(*(int *)arg, got, sizeof(got), 0) == 2)
		received++;
	return NULL;
}

/* It sleeps in its receive: so says the kernel. */
static void wait_for_sleep(void)
{
	char path[64], text[64];
	size_t got;

	do {
		FILE *file;

		usleep(1000);
		snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", tid);
		file = fopen(path, "r");
		got = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
		text[got] = 0;
		if (file)
			fclose(file);
	} while (!got || strtol(text, NULL, 10) != SYS_recvfrom);
}

/* How many it has got, when it has them all, or 30 s later. */
static int wait_for(int count)
{
	for (int turn = 0; received < count && turn < 30000; turn++)
		usleep(1000);
	return atomic_exchange(&received, 0);
}

int main(int argc, char **argv)
{
	void (**after_bind)(void) = dlsym(RTLD_DEFAULT, "rush_after_bind");
	const char *way = argc > 1 ? argv[1] : "calm";
	int asleep = !strcmp(way, "asleep"), fd, before, early, later;
	socklen_t len = sizeof(server);
	pthread_t thread;
	pid_t child;

	stay_here();
	server.sin_family = AF_INET;
	server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int i = 0; !strcmp(way, "late") && i < 5000; i++) {
		fd = socket(AF_INET, SOCK_DGRAM, 0);
		bind(fd, (struct sockaddr *)&server, len);
		close(fd);
	}
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	bind(fd, (struct sockaddr *)&server, len);
	getsockname(fd, (struct sockaddr *)&server, &len);
	for (int i = 0; i < SENDERS; i++)
		senders[i] = socket(AF_INET, SOCK_DGRAM, 0);
	if (asleep)
		pthread_create(&thread, NULL, sleeper, &fd);
	send_all(0);
	before = asleep ? wait_for(SENDERS) : receive_all(fd, 0, "before");
	if (asleep)
		wait_for_sleep();
	if (strcmp(way, "calm") && after_bind)
		*after_bind = rush;
	else
		rush();
	child = fork();
	if (child == 0)
		_exit(0);
	waitpid(child, NULL, 0);
	if (after_bind && *after_bind) {
		/* No lane was made. */
		*after_bind = NULL;
		rush();
	}
	early = asleep ? wait_for(SENDERS) : receive_all(fd, 1, "early");
	send_all(2);
	later = asleep ? wait_for(SENDERS) : receive_all(fd, 2, "later");
	printf("%d before, %d early, %d later\n", before, early, later);
	return 0;
}
