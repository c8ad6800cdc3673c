/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A library behind the one under test: counts epoll waits with a timeout in
 * milliseconds.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

_Atomic unsigned ms_waits;

int epoll_pwait(int epfd, struct epoll_event *events, int count, int timeout,
		const sigset_t *mask)
{
	ms_waits += timeout > 0;
	return syscall(SYS_epoll_pwait, epfd, events, count, timeout, mask, 8L);
}
