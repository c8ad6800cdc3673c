/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A library behind the one under test. When a lane's socket has joined the
 * program's group, datagrams of many senders arrive before anything else is
 * done. Just before an epoll instance gets a descriptor, or an option is set,
 * the number may be reused. With RACE_NO_NETNS_COOKIE in the environment, the kernel does
 * not report the network namespace of a socket.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Called once, after the next bind(2). */
void (*race_after_bind)(void);

int bind(int fd, const struct sockaddr *addr, socklen_t len)
{
	long answer = syscall(SYS_bind, fd, addr, len);
	void (*then)(void) = race_after_bind;

	race_after_bind = NULL;
	if (then)
		then();
	return answer;
}

/* Called before each epoll_ctl(2). */
void (*race_before_epoll_ctl)(int epfd, int op, int fd);

int epoll_ctl(int epfd, int op, int fd, struct epoll_event *event)
{
	if (race_before_epoll_ctl)
		race_before_epoll_ctl(epfd, op, fd);
	return syscall(SYS_epoll_ctl, epfd, op, fd, event);
}

/* Called before each setsockopt(2). */
void (*race_before_setsockopt)(int fd, int level, int name);

int setsockopt(int fd, int level, int name, const void *value, socklen_t len)
{
	if (race_before_setsockopt)
		race_before_setsockopt(fd, level, name);
	return syscall(SYS_setsockopt, fd, level, name, value, len);
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	const int netns_cookie = 71;

	if (level == SOL_SOCKET && name == netns_cookie &&
	    getenv("RACE_NO_NETNS_COOKIE")) {
		errno = ENOPROTOOPT;
		return -1;
	}
	return syscall(SYS_getsockopt, fd, level, name, value, len);
}
