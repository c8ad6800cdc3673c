/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Calls on descriptor numbers that the program does not have.
 *
 * Two threads receive on a socket until the library has seen each return often,
 * so that it has lanes, if there are any. Then calls are made on every number
 * that the kernel has a descriptor for and fcntl(2) denies, or else on one that
 * is not open. Each answer is printed once: the same with the library as
 * without.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/uio.h>
#include <signal.h>
#include <unistd.h>

#define HIDDEN_MAX 256

static void *worker(void *nth)
{
	receive_all((unsigned)(unsigned long)nth);
	return NULL;
}

/* Finds the hidden numbers; returns how many there are. */
static int find_hidden(int numbers[HIDDEN_MAX])
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *at;
	int count = 0;

	while ((at = readdir(dir))) {
		int fd = atoi(at->d_name);

		if (at->d_name[0] != '.' && fcntl(fd, F_GETFD) < 0 &&
		    count < HIDDEN_MAX)
			numbers[count++] = fd;
	}
	closedir(dir);
	return count;
}

static long by_poll(int fd, int with_server)
{
	struct pollfd two[2] = { { fd, POLLIN, 0 }, { server, POLLIN, 0 } };

	if (poll(two, 1 + with_server, 10000) != 1)
		return -2;
	return two[0].fd == fd && !two[1].revents ? two[0].revents : -3;
}

static long by_ppoll(int fd)
{
	struct pollfd one = { fd, POLLIN | POLLOUT, 0 };

	return ppoll(&one, 1, NULL, NULL) == 1 ? one.revents : -2;
}

/* By the set with index `which`, with or without the server in the read set. */
static long by_select(int fd, int which, int with_server)
{
	struct timeval time = { .tv_sec = 10 };
	fd_set sets[3];

	for (int i = 0; i < 3; i++)
		FD_ZERO(&sets[i]);
	if (fd >= FD_SETSIZE) {
		errno = EBADF;
		return -1;
	}
	FD_SET(fd, &sets[which]);
	if (with_server)
		FD_SET(server, &sets[0]);
	return select(FD_SETSIZE, &sets[0], &sets[1], &sets[2], &time);
}

static long by_pselect(int fd)
{
	struct timespec time = { .tv_sec = 10 };
	fd_set set;

	FD_ZERO(&set);
	if (fd >= FD_SETSIZE) {
		errno = EBADF;
		return -1;
	}
	FD_SET(fd, &set);
	return pselect(FD_SETSIZE, &set, NULL, NULL, &time, NULL);
}

/* Makes call number `nth`. Returns its name; NULL if there are no more. */
static const char *make_call(int nth, int fd, long *answer)
{
	char data[8] = "12345678";
	struct iovec part = { data, sizeof(data) };
	struct sockaddr_in to = address;
	socklen_t len = sizeof(to);
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	struct mmsghdr many = { .msg_hdr = message };
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(EPOLL_CLOEXEC), number = 1;
	sigset_t none;
	const char *name = NULL;

	sigemptyset(&none);
	message.msg_name = &to;
	message.msg_namelen = len;
#define CALL(n, what)           \
	case n:                 \
		name = #what;   \
		*answer = what; \
		break
	switch (nth) {
		CALL(0, recv(fd, data, sizeof(data), MSG_DONTWAIT));
		CALL(1, recvfrom(fd, data, sizeof(data), MSG_DONTWAIT,
				 (void *)&to, &len));
		CALL(2, recvmsg(fd, &message, MSG_DONTWAIT));
		CALL(3, recvmmsg(fd, &many, 1, MSG_DONTWAIT, NULL));
		CALL(4, read(fd, data, sizeof(data)));
		CALL(5, read(fd, data, 0));
		CALL(6, readv(fd, &part, 1));
		CALL(7, send(fd, data, sizeof(data), MSG_DONTWAIT));
		CALL(8, sendto(fd, data, sizeof(data), MSG_DONTWAIT,
			       (void *)&to, len));
		CALL(9, sendmsg(fd, &message, MSG_DONTWAIT));
		CALL(10, sendmmsg(fd, &many, 1, MSG_DONTWAIT));
		CALL(11, write(fd, data, sizeof(data)));
		CALL(12, writev(fd, &part, 1));
		CALL(13, bind(fd, (void *)&to, len));
		CALL(14, connect(fd, (void *)&to, len));
		CALL(15, shutdown(fd, SHUT_RD));
		CALL(16, accept(fd, NULL, NULL));
		CALL(17, accept4(fd, NULL, NULL, SOCK_CLOEXEC));
		CALL(18, getsockname(fd, (void *)&to, &len));
		CALL(19, getpeername(fd, (void *)&to, &len));
		CALL(20, setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &number,
				    sizeof(number)));
		CALL(21, setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &number,
				    sizeof(number)));
		CALL(22, getsockopt(fd, SOL_SOCKET, SO_TYPE, &number, &len));
		CALL(23, getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, data, &len));
		CALL(24, ioctl(fd, FIONREAD, &number));
		CALL(25, ioctl(fd, FIONBIO, &number));
		CALL(26, fcntl(fd, F_GETFD));
		CALL(27, fcntl(fd, F_SETFL, O_NONBLOCK));
		CALL(28, fcntl(fd, F_DUPFD_CLOEXEC, 0));
		CALL(29, fcntl(fd, F_GETOWN));
		CALL(30, dup(fd));
		CALL(31, dup2(fd, 3000));
		CALL(32, dup2(fd, fd));
		CALL(33, dup3(fd, 3000, 0));
		CALL(34, close(fd));
		CALL(35, epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
		CALL(36, epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
		CALL(37, epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
		CALL(38, epoll_ctl(fd, EPOLL_CTL_ADD, server, &event));
		CALL(39, epoll_wait(fd, &event, 1, 0));
		CALL(40, epoll_pwait(fd, &event, 1, 0, NULL));
		CALL(41, by_poll(fd, 0));
		CALL(42, by_poll(fd, 1));
		CALL(43, by_ppoll(fd));
		CALL(44, by_select(fd, 0, 0));
		CALL(45, by_select(fd, 1, 1));
		CALL(46, by_select(fd, 2, 1));
		CALL(47, by_pselect(fd));
		CALL(48, signalfd(fd, &none, 0));
		CALL(49, setns(fd, CLONE_NEWNET));
		CALL(50, dup3(fd, 3000, 1));
		CALL(51, dup3(fd, fd, 0));
		CALL(52, openat(fd, "nothing", O_RDONLY));
	}
	number = errno;
	close(epoll);
	errno = number;
	return name;
}

int main(void)
{
	int numbers[HIDDEN_MAX] = { 1000 }, count, rounds;
	const char *name = "";

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(300);
	/* select(2) ignores numbers beyond the table of descriptors. */
	dup2(0, FD_SETSIZE - 1);
	close(FD_SETSIZE - 1);
	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();

	count = find_hidden(numbers);
	count += !count;
	for (int nth = 0; name; nth++) {
		long answer, first = 0;
		int error = 0;

		for (int i = 0; i < count; i++) {
			errno = 0;
			name = make_call(nth, numbers[i], &answer);
			if (!name)
				break;
			if (i && answer == first && errno == error)
				continue;
			first = answer;
			error = errno;
			printf("%s = %ld, %s\n", name, answer,
			       strerrorname_np(error));
		}
	}
	/* All datagrams still arrive. */
	for (rounds = 0; rounds < 100; rounds++)
		send_all_and_wait('x');
	while (rounds-- > 0)
		send_all('e');
	for (int i = 0; i < WORKERS; i++)
		pthread_join(workers[i], NULL);
	return 0;
}
