/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The program acts as the launcher of its own library. While the library waits
 * for an answer to its request for queues, which is a refusal, another thread
 * of the program puts a file at the number of the library's end of the
 * connection (dup2). After that, the number and the file are the program's.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "manylane_lease.h"

#define ROUNDS 100

static int listener, file[2], number, copy = -1;
static volatile int has_asked;

/* True if a descriptor is the other end of `end`. Bypasses the library. */
static int is_peer(int fd, int end)
{
	socklen_t len = sizeof(int);
	int kind = 0, domain = 0;

	syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &domain, &len);
	syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_TYPE, &kind, &len);
	return fd != end && fd != listener && domain == AF_UNIX &&
	       kind == SOCK_SEQPACKET;
}

static void *put_file(void *unused)
{
	copy = dup2(file[0], number);
	return unused;
}

static void *serve(void *unused)
{
	struct mll_message message;
	pthread_t thread;
	int end = accept(listener, NULL, NULL);

	/* The kernel closes the descriptors of the message. */
	if (recv(end, &message, sizeof(message), 0) != sizeof(message))
		errx(1, "no request");
	has_asked = 1;
	for (number = 3; number < 65536 && !is_peer(number, end); number++)
		;
	pthread_create(&thread, NULL, put_file, NULL);
	usleep(200000);
	message.kind = MLL_REFUSED;
	message.error = ENOSPC;
	send(end, &message, sizeof(message), MSG_NOSIGNAL);
	pthread_join(thread, NULL);
	close(end);
	return unused;
}

int main(void)
{
	const char *ticket = getenv("MANYLANE_LEASE_SOCKET");
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	struct sockaddr_in local = { .sin_family = AF_INET };
	socklen_t len = sizeof(local);
	struct stat ours, theirs;
	char data[8];
	pthread_t thread;
	int udp, i;

	listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	i = sprintf(at.sun_path + 1, "manylane.lease.%.16s", ticket);
	if (bind(listener, (void *)&at, sizeof(at.sun_family) + 1 + i) ||
	    listen(listener, 1) || pipe(file))
		err(1, "listen");
	pthread_create(&thread, NULL, serve, NULL);
	udp = socket(AF_INET, SOCK_DGRAM, 0);
	local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(udp, (void *)&local, sizeof(local)) ||
	    getsockname(udp, (void *)&local, &len))
		err(1, "bind");
	for (i = 0; i < ROUNDS && !has_asked; i++) {
		sendto(udp, "data", 4, 0, (void *)&local, len);
		if (recv(udp, data, sizeof(data), 0) != 4)
			err(1, "recv");
	}
	printf("asked: %d\n", has_asked);
	if (has_asked)
		pthread_join(thread, NULL);
	printf("its number: %d\n", copy == number);
	printf("its file: %d\n", !fstat(file[0], &ours) &&
					 !fstat(number, &theirs) &&
					 ours.st_ino == theirs.st_ino);
	return 0;
}
