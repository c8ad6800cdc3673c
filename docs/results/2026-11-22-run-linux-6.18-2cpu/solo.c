/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A server with one receiver, and its client: solo server none|epoll|poll; solo client PORT REQUESTS WINDOW */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>
static double cpu(void)
{
	struct timespec t;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}
int main(int c, char **v)
{
	struct sockaddr_in a = { .sin_family = AF_INET }, p;
	socklen_t n = sizeof a;
	a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	char b[2048];
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (!strcmp(v[1], "server")) {
		int ep = !strcmp(v[2], "epoll"), po = !strcmp(v[2], "poll"),
		    e = -1;
		struct epoll_event ev = { .events = EPOLLIN };
		struct pollfd at = { fd, POLLIN, 0 };
		bind(fd, (void *)&a, n);
		getsockname(fd, (void *)&a, &n);
		printf("%d\n", ntohs(a.sin_port));
		fflush(stdout);
		if (ep) {
			e = epoll_create1(0);
			epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev);
		}
		long cnt = 0;
		double s = 0;
		for (;;) {
			if (ep)
				epoll_wait(e, &ev, 1, -1);
			if (po)
				poll(&at, 1, -1);
			n = sizeof p;
			long g = recvfrom(fd, b, sizeof b, 0, (void *)&p, &n);
			if (g < 0)
				continue;
			if (g == 1)
				break;
			if (cnt++ == 1000)
				s = cpu();
			sendto(fd, b, g, 0, (void *)&p, n);
		}
		printf("%.1f\n", (cpu() - s) / (cnt - 1001));
	} else {
		a.sin_port = htons(atoi(v[2]));
		long N = atol(v[3]), w = atol(v[4]), sent = 0, got = 0;
		connect(fd, (void *)&a, n);
		memset(b, 'x', 32);
		while (got < N) {
			while (sent < N && sent - got < w) {
				if (send(fd, b, 32, 0) == 32)
					sent++;
			}
			if (recv(fd, b, sizeof b, 0) > 0)
				got++;
		}
		send(fd, b, 1, 0);
	}
}
