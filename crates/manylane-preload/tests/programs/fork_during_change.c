/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads receive on a socket. A third one changes it, and ends in the
 * middle (at a point that the library is told). Then the process forks.
 *
 * Prints how many descriptors of the socket the child has.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <dirent.h>
#include <string.h>
#include <sys/wait.h>

static void *worker(void *nth)
{
	receive_all((unsigned)(unsigned long)nth);
	return NULL;
}

static _Atomic pid_t changer_tid;

static void *changer(void *unused)
{
	int one = 1;

	(void)unused;
	changer_tid = gettid();
	setsockopt(server, SOL_IP, IP_RECVERR, &one, sizeof(one));
	return NULL;
}

/*
 * Waits until the third thread has ended, in the middle: not by pthread_join,
 * because it may not have ended as the C library expects.
 */
static void wait_for_changer(void)
{
	char path[64];

	while (!changer_tid)
		usleep(1000);
	snprintf(path, sizeof(path), "/proc/self/task/%d", changer_tid);
	while (!access(path, F_OK))
		usleep(1000);
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
	pthread_t thread;
	pid_t child;

	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();
	pthread_create(&thread, NULL, changer, NULL);
	wait_for_changer();
	child = fork();
	if (!child) {
		printf("%d\n", count_descriptors());
		fflush(stdout);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	return 0;
}
