/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a program sees of its socket while it has lanes whose owners are away.
 *
 * Three threads receive until the library has seen each return often. Then they
 * park with their lanes. The main thread makes many calls, and prints their
 * results: the same with the library as without.
 */
#define _GNU_SOURCE
#include "loopback.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/time.h>
#include <dirent.h>
#include <time.h>

#define FLOWS 16
#define WORKERS 3
/* Datagrams of each flow: more than fit into a default receive buffer. */
#define DATAGRAMS_PER_FLOW 600

static int server, clients[FLOWS];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], parked, total;
static sem_t leave;

#define CHECK(cond) printf("%s: %s\n", #cond, (cond) ? "yes" : "no")

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char data[2000];

	for (;;) {
		struct sockaddr_in from;
		socklen_t len = sizeof(from);
		ssize_t got = recvfrom(server, data, sizeof(data), 0,
				       (void *)&from, &len);

		if (got < 0) {
			perror("worker");
			exit(1);
		}
		sendto(server, data, got, 0, (void *)&from, len);
		received[nth]++;
		total++;
		if (data[0] == 'P')
			break;
	}
	parked++;
	sem_wait(&leave);
	return NULL;
}

/* Sends one datagram, and waits until it is queued. */
static void send_queued(int flow, const void *data, size_t len)
{
	if (send(clients[flow], data, len, 0) != (ssize_t)len)
		perror("send");
	wait_for_delivery();
}

/* Sends one datagram of `len` bytes from each of the flows. */
static void burst(char what, size_t len)
{
	char data[2000];
	int i;

	memset(data, what, sizeof(data));
	for (i = 0; i < FLOWS; i++)
		if (send(clients[i], data, len, 0) != (ssize_t)len)
			perror("send");
	wait_for_delivery();
}

/* Receives until the queue is empty; returns the number. */
static int drain(void)
{
	char data[2000];
	int count = 0;

	while (recv(server, data, sizeof(data), MSG_DONTWAIT) >= 0)
		count++;
	return errno == EAGAIN ? count : -errno;
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int count = 0;

	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

static void ignore_signal(int signal)
{
	(void)signal;
}

static void *send_later(void *arg)
{
	usleep(60000);
	burst('l', 1);
	return arg;
}

static int get_option(int level, int name)
{
	int value = -1;
	socklen_t len = sizeof(value);

	getsockopt(server, level, name, &value, &len);
	return value;
}

static void set_option(int level, int name, int value)
{
	if (setsockopt(server, level, name, &value, sizeof(value)))
		printf("option %d of %d: %s\n", name, level, strerror(errno));
}

static void waits(void)
{
	struct pollfd at = { .fd = server, .events = POLLIN | POLLOUT };
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 77 },
			   got = { 0 };
	struct timeval soon = { .tv_usec = 30000 };
	int epoll = epoll_create1(0), i;
	fd_set set_option;
	long start;

	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	CHECK(poll(&at, 1, 0) == 1 && at.revents == POLLOUT);
	CHECK(epoll_wait(epoll, &got, 1, 0) == 0);
	at.events = POLLIN;
	start = now_ms();
	CHECK(poll(&at, 1, 50) == 0 && at.revents == 0);
	CHECK(now_ms() - start >= 50);
	start = now_ms();
	CHECK(epoll_wait(epoll, &got, 1, 50) == 0);
	CHECK(now_ms() - start >= 49);
	FD_ZERO(&set_option);
	FD_SET(server, &set_option);
	CHECK(select(server + 1, &set_option, NULL, NULL, &soon) == 0 &&
	      !FD_ISSET(server, &set_option));
	/* One at a time, whichever lane gets it. */
	for (i = 0; i < FLOWS; i++) {
		char data[8];

		send_queued(i, "w", 1);
		if (poll(&at, 1, 0) != 1 || at.revents != POLLIN ||
		    at.fd != server)
			printf("flow %d: poll\n", i);
		if (epoll_wait(epoll, &got, 1, 0) != 1 || got.data.u64 != 77 ||
		    got.events != EPOLLIN)
			printf("flow %d: epoll\n", i);
		FD_ZERO(&set_option);
		FD_SET(server, &set_option);
		if (select(server + 1, &set_option, NULL, NULL, NULL) != 1 ||
		    !FD_ISSET(server, &set_option))
			printf("flow %d: select\n", i);
		if (recv(server, data, sizeof(data), MSG_DONTWAIT) != 1 ||
		    data[0] != 'w')
			printf("flow %d: recv\n", i);
	}
	CHECK(poll(&at, 1, 0) == 0);
	CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event) == -1 &&
	      errno == EEXIST);
	event.events = 0;
	CHECK(epoll_ctl(epoll, EPOLL_CTL_MOD, server, &event) == 0);
	burst('m', 1);
	CHECK(epoll_wait(epoll, &got, 1, 30) == 0);
	CHECK(epoll_ctl(epoll, EPOLL_CTL_DEL, server, NULL) == 0);
	CHECK(epoll_ctl(epoll, EPOLL_CTL_DEL, server, NULL) == -1 &&
	      errno == ENOENT);
	CHECK(drain() == FLOWS);
	close(epoll);
}

static void peeks(void)
{
	char data[2000];
	int i, size;

	for (i = 0; i < FLOWS; i++) {
		char other = 'a' + i;

		send_queued(i, &other, 1);
	}
	for (i = 0; i < FLOWS; i++) {
		char first;

		if (recv(server, data, 1, MSG_PEEK | MSG_DONTWAIT) != 1)
			printf("peek %d: nothing\n", i);
		first = data[0];
		/* A datagram that arrives in between is queued behind. */
		send_queued((i + 5) % FLOWS, "zz", 2);
		if (recv(server, data, sizeof(data), MSG_DONTWAIT) < 1 ||
		    data[0] != first)
			printf("peek %d: another one\n", i);
	}
	CHECK(drain() == FLOWS);
	for (i = 0; i < FLOWS; i++) {
		send_queued(i, data, 100 + i);
		if (ioctl(server, FIONREAD, &size) || size != 100 + i)
			printf("size %d: %d\n", i, size);
		if (recv(server, data, 10, MSG_TRUNC | MSG_DONTWAIT) != 100 + i)
			printf("truncated %d\n", i);
	}
	CHECK(ioctl(server, FIONREAD, &size) == 0 && size == 0);
	CHECK(read(server, data, 0) == 0);
}

static void timeouts(void)
{
	struct timeval time = { .tv_usec = 70000 }, back = { 0 };
	socklen_t len = sizeof(back);
	struct sigaction action = { .sa_handler = ignore_signal };
	/* Repeatedly, because one may arrive before the receive has begun. */
	struct itimerval alarm = { { .tv_usec = 30000 }, { .tv_usec = 30000 } },
			 none = { 0 };
	pthread_t thread;
	char data[8];
	long start;

	CHECK(setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &time,
			 sizeof(time)) == 0);
	CHECK(getsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &back, &len) == 0 &&
	      back.tv_sec == 0);
	/* The kernel rounds to its own ticks. */
	CHECK(back.tv_usec >= 70000 && back.tv_usec < 80000);
	start = now_ms();
	CHECK(recv(server, data, sizeof(data), 0) == -1 && errno == EAGAIN);
	/* Up to a tick of 4 ms early, and both times are in whole milliseconds. */
	CHECK(now_ms() - start >= back.tv_usec / 1000 - 5);
	time.tv_usec = 0;
	CHECK(setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &time,
			 sizeof(time)) == 0);
	/* An alarm interrupts, or does not. */
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &alarm, NULL);
	CHECK(recv(server, data, sizeof(data), 0) == -1 && errno == EINTR);
	setitimer(ITIMER_REAL, &none, NULL);
	action.sa_flags = SA_RESTART;
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &alarm, NULL);
	pthread_create(&thread, NULL, send_later, NULL);
	CHECK(recv(server, data, sizeof(data), 0) == 1 && data[0] == 'l');
	pthread_join(thread, NULL);
	setitimer(ITIMER_REAL, &none, NULL);
	signal(SIGALRM, SIG_DFL);
	CHECK(drain() == FLOWS - 1);
}

/* Checks that each datagram of a burst has the requested control messages. */
static void controls(void)
{
	int i, seen[6] = { 0 };

	set_option(SOL_IP, IP_PKTINFO, 1);
	set_option(SOL_IP, IP_RECVTOS, 1);
	set_option(SOL_IP, IP_RECVTTL, 1);
	set_option(SOL_SOCKET, SO_TIMESTAMPNS, 1);
	set_option(SOL_IP, IP_TOS, 0x20);
	for (i = 0; i < FLOWS; i++) {
		int tos = 0x10;

		setsockopt(clients[i], SOL_IP, IP_TOS, &tos, sizeof(tos));
	}
	burst('c', 20);
	for (i = 0; i < FLOWS; i++) {
		char data[64], control[256];
		struct iovec part = { data, sizeof(data) };
		struct sockaddr_in from;
		struct msghdr message = { .msg_name = &from,
					  .msg_namelen = sizeof(from),
					  .msg_iov = &part,
					  .msg_iovlen = 1,
					  .msg_control = control,
					  .msg_controllen = sizeof(control) };
		struct cmsghdr *at;

		if (recvmsg(server, &message, MSG_DONTWAIT) != 20 ||
		    message.msg_flags)
			printf("message %d\n", i);
		for (at = CMSG_FIRSTHDR(&message); at;
		     at = CMSG_NXTHDR(&message, at)) {
			seen[0] += at->cmsg_level == SOL_IP &&
				   at->cmsg_type == IP_PKTINFO;
			seen[1] += at->cmsg_level == SOL_IP &&
				   at->cmsg_type == IP_TOS &&
				   *(unsigned char *)CMSG_DATA(at) == 0x10;
			seen[2] += at->cmsg_level == SOL_IP &&
				   at->cmsg_type == IP_TTL;
			seen[3] += at->cmsg_level == SOL_SOCKET &&
				   at->cmsg_type == SCM_TIMESTAMPNS;
		}
		sendmsg(server,
			&(struct msghdr){ .msg_name = &from,
					  .msg_namelen = sizeof(from),
					  .msg_iov = &part,
					  .msg_iovlen = 1 },
			0);
	}
	printf("controls %d %d %d %d\n", seen[0], seen[1], seen[2], seen[3]);
	CHECK(get_option(SOL_IP, IP_TOS) == 0x20);
	wait_for_delivery();
}

/* Counts the replies that are there. */
static int replies(void)
{
	char data[2000];
	int i, count = 0;

	for (i = 0; i < FLOWS; i++)
		while (recv(clients[i], data, sizeof(data), MSG_DONTWAIT) >= 0)
			count++;
	return count;
}

/* Waits for that many replies. */
static void wait_for_replies(int count)
{
	while ((count -= replies()) > 0)
		usleep(50);
}

/*
 * A size above the system's limit, which needs a privilege, is set on every
 * lane.
 */
static void buffers(void)
{
	int room = 16 << 20, i;

	if (setsockopt(server, SOL_SOCKET, SO_RCVBUFFORCE, &room,
		       sizeof(room))) {
		CHECK(errno == EPERM);
		return;
	}
	for (i = 0; i < DATAGRAMS_PER_FLOW * FLOWS; i++) {
		if (send(clients[i % FLOWS], "f", 1, 0) != 1)
			perror("send");
		/* The kernel's queue of a CPU has room for these. */
		if (i % DATAGRAMS_PER_FLOW == 0)
			wait_for_delivery();
	}
	wait_for_delivery();
	CHECK(drain() == DATAGRAMS_PER_FLOW * FLOWS);
}

static void numbers(void)
{
	struct rlimit limit;
	int high, copy, other, one = 1;
	char data[8];

	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max < 5000 ? limit.rlim_max : 5000;
	setrlimit(RLIMIT_NOFILE, &limit);
	high = fcntl(server, F_DUPFD_CLOEXEC, 1500);
	CHECK(high >= 1500);
	burst('h', 3);
	CHECK(recv(high, data, sizeof(data), MSG_DONTWAIT) == 3);
	copy = dup(server);
	CHECK(read(copy, data, sizeof(data)) == 3);
	/* The library may use these numbers; the program does not know. */
	for (other = 700; other < 3000; other++)
		if (other != high && dup2(1, other) == other)
			close(other);
	CHECK(drain() == FLOWS - 2);
	close_range(100, ~0u, 0);
	CHECK(recv(high, data, sizeof(data), MSG_DONTWAIT) == -1 &&
	      errno == EBADF);
	close(copy);
	burst('h', 3);
	CHECK(drain() == FLOWS);
	CHECK(fcntl(server, F_SETFL, O_NONBLOCK) == 0);
	CHECK(recv(server, data, sizeof(data), 0) == -1 && errno == EAGAIN);
	CHECK(fcntl(server, F_SETFL, 0) == 0);
	CHECK(ioctl(server, FIONBIO, &one) == 0);
	CHECK(read(server, data, sizeof(data)) == -1 && errno == EAGAIN);
	one = 0;
	CHECK(ioctl(server, FIONBIO, &one) == 0);
	/* The port is in use, with the program's options. */
	other = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(bind(other, (void *)&address, sizeof(address)) == -1 &&
	      errno == EADDRINUSE);
	close(other);
	CHECK(get_option(SOL_SOCKET, SO_REUSEPORT) == 0);
}

int main(void)
{
	pthread_t threads[WORKERS];
	socklen_t len = sizeof(address);
	int i, before;

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	setvbuf(stdout, NULL, _IONBF, 0);
	/* Closes descriptors that the test was started with. */
	close_range(100, ~0u, 0);
	before = count_fds();
	sem_init(&leave, 0, 0);
	server = socket(AF_INET, SOCK_DGRAM, 0);
	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK(bind(server, (void *)&address, sizeof(address)) == 0);
	CHECK(getsockname(server, (void *)&address, &len) == 0 &&
	      address.sin_port != 0);
	for (i = 0; i < FLOWS; i++) {
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
		connect(clients[i], (void *)&address, sizeof(address));
	}
	for (i = 0; i < WORKERS; i++)
		pthread_create(&threads[i], NULL, worker,
			       (void *)(unsigned long)i);
	/*
	 * Until each has returned, and lanes, if any, have existed for a while.
	 */
	for (i = 0; i < 200 || !received[0] || !received[1] || !received[2];
	     i++) {
		unsigned want = total + FLOWS;

		burst('x', 10);
		while (total < want)
			usleep(50);
		/* All of them, so that none comes later. */
		wait_for_replies(FLOWS);
	}
	for (i = 0; i < WORKERS; i++) {
		send(clients[i], "P", 1, 0);
		while (parked <= (unsigned)i)
			usleep(50);
		wait_for_replies(1);
	}
	pin_to_this_cpu();
	CHECK(replies() == 0);

	CHECK(drain() == 0);
	burst('y', 10);
	CHECK(drain() == FLOWS);
	waits();
	peeks();
	timeouts();
	CHECK(replies() == 0);
	controls();
	CHECK(replies() == FLOWS);
	buffers();
	numbers();
	/* With IP_RECVERR, the socket is plain. */
	burst('e', 9);
	set_option(SOL_IP, IP_RECVERR, 1);
	burst('e', 9);
	CHECK(drain() == 2 * FLOWS);
	CHECK(get_option(SOL_IP, IP_RECVERR) == 1);

	for (i = 0; i < WORKERS; i++)
		sem_post(&leave);
	for (i = 0; i < WORKERS; i++)
		pthread_join(threads[i], NULL);
	close(server);
	/* The port is free again. */
	server = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(bind(server, (void *)&address, sizeof(address)) == 0);
	burst('b', 4);
	CHECK(drain() == FLOWS);
	close(server);
	for (i = 0; i < FLOWS; i++)
		close(clients[i]);
	CHECK(count_fds() == before);
	return 0;
}
