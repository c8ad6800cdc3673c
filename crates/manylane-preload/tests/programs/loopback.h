/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Helpers of most of these programs. */
#ifndef LOOPBACK_H
#define LOOPBACK_H

#include <arpa/inet.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/*
 * Opens a UDP socket on a port of 127.0.0.1 that the kernel selects, and writes
 * its address. `flags` as for socket(2).
 */
static inline int loopback_server(int flags, struct sockaddr_in *address)
{
	int fd = socket(AF_INET, SOCK_DGRAM | flags, 0);
	socklen_t len = sizeof(*address);

	*address = (struct sockaddr_in){ .sin_family = AF_INET };
	address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (fd < 0 || bind(fd, (void *)address, sizeof(*address)) ||
	    getsockname(fd, (void *)address, &len)) {
		perror("a socket on loopback");
		exit(1);
	}
	return fd;
}

/*
 * Waits until all sent datagrams are queued at their sockets. Loopback delivers
 * the datagrams of a CPU in order, and a later one has arrived at a socket of
 * its own.
 */
static inline void wait_for_delivery(void)
{
	struct sockaddr_in own = { .sin_family = AF_INET };
	socklen_t len = sizeof(own);
	int fd = syscall(SYS_socket, AF_INET, SOCK_DGRAM, 0);
	char byte = 0;

	own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	syscall(SYS_bind, fd, &own, len);
	syscall(SYS_getsockname, fd, &own, &len);
	syscall(SYS_sendto, fd, &byte, 1, 0, &own, len);
	while (syscall(SYS_recvfrom, fd, &byte, 1, 0, NULL, NULL) != 1)
		;
	syscall(SYS_close, fd);
}

/* Pins the thread to its current CPU, so that one CPU sends everything. */
static inline void pin_to_this_cpu(void)
{
	cpu_set_t here;

	CPU_ZERO(&here);
	CPU_SET(sched_getcpu(), &here);
	sched_setaffinity(0, sizeof(here), &here);
}

#endif
