/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two threads wait for one socket, each on an epoll instance of its own, until
 * both have received often. Then a child of a fork closes the socket, as a
 * program does that is about to execute another one. What the instances watch
 * stays, because the parent still has the socket.
 *
 * Prints how many instances watch something else than the socket itself, and
 * how many have changed.
 */
#define _GNU_SOURCE
#include "parked_epolls.h"

#include <string.h>
#include <sys/wait.h>

/* The descriptor that an instance watches. */
static int watched(int instance)
{
	char path[64], line[256];
	int fd = -1;
	FILE *info;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", instance);
	info = fopen(path, "r");
	while (info && fgets(line, sizeof(line), info))
		sscanf(line, "tfd: %d", &fd);
	fclose(info);
	return fd;
}

int main(void)
{
	int before[WORKERS], lanes = 0, changed = 0;
	pid_t child;

	warm_up_and_park();
	for (int i = 0; i < WORKERS; i++) {
		before[i] = watched(instances[i]);
		lanes += before[i] != server;
	}
	child = fork();
	if (!child) {
		close(server);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	for (int i = 0; i < WORKERS; i++)
		changed += watched(instances[i]) != before[i];
	printf("lanes: %d, changed: %d\n", lanes, changed);
	return 0;
}
