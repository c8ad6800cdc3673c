/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server with one receiver forks, while datagrams arrive at the moment at
 * which the library makes lanes for its children. None of them may be lost.
 *
 *	fork_under_traffic MODE
 *
 * before: they arrive before. during: they arrive at that moment. late: the same,
 * for a socket that is the 5000th of its process. asleep: the same, and the
 * receiver is another thread, which sleeps in a receive and has to be woken by
 * each.
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

static void send_during_bind(void)
{
	send_all(1);
}

/*
 * Receives each queued datagram once; returns how many are of the given round.
 */
static int receive_all(int fd, int round, const char *mode)
{
	unsigned char seen[SENDERS] = { 0 };
	unsigned char got[16];
	int count = 0, size;

	wait_for_delivery();
	for (;;) {
		struct pollfd at = { .fd = fd, .events = POLLIN };
		int ready = poll(&at, 1, 0);

		size = 0;
		ioctl(fd, FIONREAD, &size);
		if (ready == 0) {
			if (recv(fd, got, sizeof(got), MSG_DONTWAIT) >= 0)
				printf("%s: something that poll did not see\n",
				       mode);
			return count;
		}
		if (size != 2)
			printf("%s: FIONREAD says %d\n", mode, size);
		if (recv(fd, got, sizeof(got), MSG_DONTWAIT) != 2 ||
		    got[0] >= SENDERS || got[1] != round || seen[got[0]]++)
			return -1;
		count++;
	}
}

static atomic_int received, tid;

static void *sleeping_receiver(void *arg)
{
	unsigned char got[16];

	tid = gettid();
	while (recv(*(int *)arg, got, sizeof(got), 0) == 2)
		received++;
	return NULL;
}

/* Waits until the thread sleeps in its receive, as the kernel reports. */
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

/* Waits up to 100 s for `count` datagrams; returns how many were received. */
static int wait_for_count(int count)
{
	for (int tries = 0; received < count && tries < 100000; tries++)
		usleep(1000);
	return atomic_exchange(&received, 0);
}

int main(int argc, char **argv)
{
	void (**after_bind)(void) = dlsym(RTLD_DEFAULT, "race_after_bind");
	const char *mode = argc > 1 ? argv[1] : "before";
	int asleep = !strcmp(mode, "asleep"), fd, before, during, later;
	socklen_t len = sizeof(server);
	pthread_t thread;
	pid_t child;

	pin_to_this_cpu();
	server.sin_family = AF_INET;
	server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int i = 0; !strcmp(mode, "late") && i < 5000; i++) {
		fd = socket(AF_INET, SOCK_DGRAM, 0);
		bind(fd, (struct sockaddr *)&server, len);
		close(fd);
	}
	fd = loopback_server(0, &server);
	for (int i = 0; i < SENDERS; i++)
		senders[i] = socket(AF_INET, SOCK_DGRAM, 0);
	if (asleep)
		pthread_create(&thread, NULL, sleeping_receiver, &fd);
	send_all(0);
	before =
		asleep ? wait_for_count(SENDERS) : receive_all(fd, 0, "before");
	if (asleep)
		wait_for_sleep();
	if (strcmp(mode, "before") && after_bind)
		*after_bind = send_during_bind;
	else
		send_during_bind();
	child = fork();
	if (child == 0)
		_exit(0);
	waitpid(child, NULL, 0);
	if (after_bind && *after_bind) {
		/* No lane was created. */
		*after_bind = NULL;
		send_during_bind();
	}
	during =
		asleep ? wait_for_count(SENDERS) : receive_all(fd, 1, "during");
	send_all(2);
	later = asleep ? wait_for_count(SENDERS) : receive_all(fd, 2, "later");
	printf("%d before, %d during, %d later\n", before, during, later);
	return 0;
}
