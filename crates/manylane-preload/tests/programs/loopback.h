/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What most of these programs start with. */
#ifndef LOOPBACK_H
#define LOOPBACK_H

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

/* A UDP socket on a port of 127.0.0.1 that the kernel picks; address says which. flags as for socket(2). */
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

#endif
