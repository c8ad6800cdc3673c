/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads receive on a socket. A third one changes it, and ends in the
 * middle (at a point that the library is told). Then the process forks.
 *
 * Prints how many descriptors of the socket the child has.
 */
#define _GNU_SOURCE
#include "loopback.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>

#define WORKERS 2
#define FLOWS 64
#define WARM_UP_DATAGRAMS 100
/* Longer than the library needs until the third thread is in the middle. */
#define CHANGE_USECS 300000

static int server;
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS];

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (recv(server, &byte, 1, 0) == 1)
		received[nth]++;
	return NULL;
}

static void *changer(void *unused)
{
	int one = 1;

	(void)unused;
	setsockopt(server, SOL_IP, IP_RECVERR, &one, sizeof(one));
	return NULL;
}

static void link_of(int fd, char *link, size_t size)
{
	char path[64];
	ssize_t len;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	len = readlink(path, link, size - 1);
	link[len < 0 ? 0 : len] = 0;
}

static int count_descriptors(void)
{
	char ours[64], other[64];
	struct dirent *entry;
	int count = 0;
	DIR *folder = opendir("/proc/self/fd");

	link_of(server, ours, sizeof(ours));
	while (folder && (entry = readdir(folder))) {
		link_of(atoi(entry->d_name), other, sizeof(other));
		count += entry->d_name[0] != '.' && !strcmp(ours, other);
	}
	return count;
}

int main(void)
{
	unsigned sent = 0;
	pthread_t thread;
	pid_t child;

	server = loopback_server(0, &address);
	for (unsigned long i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker, (void *)i);
	while (received[0] < WARM_UP_DATAGRAMS ||
	       received[1] < WARM_UP_DATAGRAMS) {
		for (int i = 0; i < FLOWS; i++) {
			static int clients[FLOWS];

			if (!clients[i])
				clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
			sendto(clients[i], "x", 1, 0, (void *)&address,
			       sizeof(address));
		}
		sent += FLOWS;
		while (received[0] + received[1] < sent)
			usleep(50);
	}
	pthread_create(&thread, NULL, changer, NULL);
	usleep(CHANGE_USECS);
	child = fork();
	if (!child) {
		printf("%d\n", count_descriptors());
		fflush(stdout);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	return 0;
}
