/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A library behind the one under test: counts calls that wait or receive. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

_Atomic unsigned long counted_calls;

ssize_t recv(int fd, void *to, size_t len, int flags)
{
	counted_calls++;
	return syscall(SYS_recvfrom, fd, to, len, flags, NULL, NULL);
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *time,
	  const sigset_t *mask)
{
	/* The kernel writes the remaining time. */
	struct timespec left = time ? *time : (struct timespec){ 0 };

	counted_calls++;
	return syscall(SYS_ppoll, fds, count, time ? &left : NULL, mask, 8L);
}
