/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A library behind the one under test. A signal arrives at the moment at which
 * a wait has ended without a result, before the next wait. And a function of
 * the program runs once the kernel has returned the value of an option.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Waits of the thread until the signal; 0 means none. */
_Thread_local unsigned signal_after_waits;
/* The function to run after getsockopt; null means none. */
_Thread_local void (*run_after_getsockopt)(void);

static long after_wait(long answer, int waited)
{
	int saved = errno;

	if (waited && (answer == 0 || (answer < 0 && errno == EAGAIN)) &&
	    signal_after_waits && --signal_after_waits == 0)
		syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1);
	errno = saved;
	return answer;
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *len)
{
	long answer = syscall(SYS_getsockopt, fd, level, name, value, len);
	void (*then)(void) = run_after_getsockopt;

	run_after_getsockopt = NULL;
	if (then)
		then();
	return answer;
}

ssize_t recv(int fd, void *to, size_t len, int flags)
{
	return after_wait(syscall(SYS_recvfrom, fd, to, len, flags, NULL, NULL),
			  !(flags & MSG_DONTWAIT));
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *time,
	  const sigset_t *mask)
{
	/* The kernel writes the remaining time. */
	struct timespec left = time ? *time : (struct timespec){ 0 };

	return after_wait(
		syscall(SYS_ppoll, fds, count, time ? &left : NULL, mask, 8L),
		!time || time->tv_sec || time->tv_nsec);
}

int epoll_pwait(int fd, struct epoll_event *events, int count, int timeout,
		const sigset_t *mask)
{
	return after_wait(
		syscall(SYS_epoll_pwait, fd, events, count, timeout, mask, 8L),
		timeout != 0);
}
