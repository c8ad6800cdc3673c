/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A library behind the one under test: when a lane's socket has joined the
 * program's, datagrams of many senders come before anything else is done.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Called once, after the next bind(2). */
void (*rush_after_bind)(void);

int bind(int fd, const struct sockaddr *addr, socklen_t len)
{
	long answer = syscall(SYS_bind, fd, addr, len);
	void (*then)(void) = rush_after_bind;

	rush_after_bind = NULL;
	if (then)
		then();
	return answer;
}
