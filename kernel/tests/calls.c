// SPDX-License-Identifier: GPL-2.0-only
/* Calls of programs beside receives: waiting, closing, options; what is refused. */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/udp.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>

#include "test.h"

#ifndef UDP_ENCAP
#define UDP_ENCAP 100
#endif

static void polling(void)
{
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 4),
	    from = sender_to(fd), i;
	int level = epoll_create1(0), edge = epoll_create1(0);
	struct epoll_event in = { .events = EPOLLIN },
			   in_edge = { .events = EPOLLIN | EPOLLET }, out;
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timeval none = {};
	fd_set set;

	is(epoll_ctl(level, EPOLL_CTL_ADD, fd, &in), 0);
	is(epoll_ctl(edge, EPOLL_CTL_ADD, fd, &in_edge), 0);
	is(poll(&p, 1, 0), 0);
	is(epoll_wait(level, &out, 1, 0), 0);
	for (i = 0; i < 50; i++) {
		send_numbers(from, i, 1);
		is(poll(&p, 1, 5000), 1);
		is(p.revents, POLLIN);
		FD_ZERO(&set);
		FD_SET(fd, &set);
		is(select(fd + 1, &set, NULL, NULL, &none), 1);
		is(epoll_wait(level, &out, 1, 5000), 1);
		is(out.events, EPOLLIN);
		/* Once for each datagram, read or not. */
		is(epoll_wait(edge, &out, 1, 5000), 1);
		is(epoll_wait(edge, &out, 1, 0), 0);
	}
	is(drain(fd, NULL, 0), 50);
	is(poll(&p, 1, 0), 0);
	is(epoll_wait(level, &out, 1, 0), 0);
}

static int exclusive_fd;
static uint32_t exclusive_events;

static void *wait_exclusive(void *unused)
{
	int instance = epoll_create1(0);
	struct epoll_event in = { .events = EPOLLIN | EPOLLEXCLUSIVE }, out;
	char data[4];

	is(epoll_ctl(instance, EPOLL_CTL_ADD, exclusive_fd, &in), 0);
	/* Level-triggered: another thread may have been faster. */
	while (epoll_wait(instance, &out, 1, -1) == 1)
		if (recv(exclusive_fd, data, 4, MSG_DONTWAIT) == 4)
			__atomic_add_fetch(&exclusive_events, 1,
					   __ATOMIC_RELAXED);
	close(instance);
	return unused;
}

/* Each datagram wakes one of the instances at least. */
static void polling_exclusive(void)
{
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 4),
	    from = sender_to(fd);
	pthread_t thread[4];
	double end;
	uint32_t i;

	exclusive_fd = fd;
	for (i = 0; i < 4; i++)
		pthread_create(&thread[i], NULL, wait_exclusive, NULL);
	usleep(100000);
	for (i = 0; i < scaled(1000); i++) {
		send_numbers(from, i, 1);
		end = now() + 20;
		while (__atomic_load_n(&exclusive_events, __ATOMIC_RELAXED) <=
		       i) {
			if (now() > end)
				fail("datagram %u woke nobody", i);
			sched_yield();
		}
	}
	_exit(0);
}

static void on_alarm(int unused)
{
	(void)unused;
}

static void timeouts(void)
{
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 2);
	struct timeval limit = { .tv_usec = 200000 }, no_limit = {};
	struct sigaction action = { .sa_handler = on_alarm };
	double start = now();
	char data[4];

	refused(recv(fd, data, 4, MSG_DONTWAIT), EAGAIN);
	is(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
	start = now();
	refused(recv(fd, data, 4, 0), EAGAIN);
	if (now() - start < 0.19 || now() - start > 5)
		fail("a timeout of 0.2 s took %f s", now() - start);
	is(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &no_limit, sizeof(no_limit)),
	   0);
	is(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	refused(recv(fd, data, 4, 0), EAGAIN);
	is(fcntl(fd, F_SETFL, 0), 0);
	sigaction(SIGALRM, &action, NULL);
	alarm(1);
	refused(recv(fd, data, 4, 0), EINTR);
	/* An error that waits for nobody. */
	alarm(60);
}

static void peeking(void)
{
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 4),
	    from = sender_to(fd);
	unsigned char seen[40] = {};
	uint32_t peeked, number, i;
	struct counted c;
	int len;

	send_numbers(from, 0, 40);
	await_arrived(fd, 40);
	for (i = 0; i < 40; i++) {
		/* Wherever this thread runs by then. */
		pin(i % cpus());
		is(ioctl(fd, SIOCINQ, &len), 0);
		is(len, 4);
		is(recv(fd, &peeked, 4, MSG_PEEK), 4);
		pin((i + 1) % cpus());
		is(recv(fd, &number, 4, MSG_PEEK), 4);
		is(number, peeked);
		is(recv(fd, &number, 4, 0), 4);
		is(number, peeked);
		seen[number]++;
	}
	for (i = 0; i < 40; i++)
		is(seen[i], 1);
	c = counts_of(fd);
	is(c.sum.moved, 40);
	is(c.sum.own + c.sum.stolen, 0);
	refused(recv(fd, &number, 4, MSG_PEEK | MSG_DONTWAIT), EAGAIN);
	is(ioctl(fd, SIOCINQ, &len), 0);
	is(len, 0);
}

/* The socket is the same through each descriptor, in each process; it ends with the last one. */
static void descriptors(void)
{
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 2),
	    from = sender_to(fd), other = dup(fd), status;
	uint32_t number, i;

	send_numbers(from, 0, 10);
	await_arrived(fd, 10);
	close(fd);
	for (i = 0; i < 5; i++)
		is(recv(other, &number, 4, MSG_DONTWAIT), 4);
	if (!fork()) {
		is(drain(other, NULL, 0), 5);
		_exit(0);
	}
	close(other);
	wait(&status);
	is(status, 0);
}

static int blocked_fd;

static void *block(void *result)
{
	uint32_t number;

	*(ssize_t *)result = recv(blocked_fd, &number, 4, 0);
	return NULL;
}

/* close() does not end a receive; the datagram after it does, as with any socket. */
static void closed_while_blocked(void)
{
	int from;
	ssize_t result = -1;
	pthread_t thread;

	blocked_fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 2);
	from = sender_to(blocked_fd);
	pthread_create(&thread, NULL, block, &result);
	usleep(200000);
	close(blocked_fd);
	usleep(50000);
	send_numbers(from, 7, 1);
	pthread_join(thread, NULL);
	is(result, 4);
}

static void refused_sockets(void)
{
	int fd = bound(AF_INET, NULL), six = bound(AF_INET6, NULL), on = 1,
	    type = 2, offset = 0, family = AF_INET, pipes[2];

	is(pipe(pipes), 0);
	refused(attach(-1, 0, 0), EBADF);
	refused(attach(pipes[0], 0, 0), ENOTSOCK);
	refused(attach(socket(AF_UNIX, SOCK_DGRAM, 0), 0, 0), EPROTONOSUPPORT);
	refused(attach(socket(AF_INET, SOCK_STREAM, 0), 0, 0), EPROTONOSUPPORT);
	refused(attach(socket(AF_INET, SOCK_RAW, IPPROTO_UDP), 0, 0),
		EPROTONOSUPPORT);
	refused(attach(socket(AF_NETLINK, SOCK_DGRAM, 0), 0, 0),
		EPROTONOSUPPORT);
	refused(attach(fd, 2, 0), EINVAL);
	refused(attach(fd, 0, MANYLANE_QUEUES_MAX + 1), EINVAL);

	/* Another hook is there. */
	if (!setsockopt(fd, SOL_UDP, UDP_ENCAP, &type, sizeof(type)))
		refused(attach(fd, 0, 2), EBUSY);
	close(fd);

	fd = bound(AF_INET, NULL);
	is(setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof(offset)), 0);
	refused(attach(fd, 0, 2), EOPNOTSUPP);
	close(fd);

	blocked_fd = bound(AF_INET, NULL);
	is(attach(blocked_fd, 0, 2), 2);
	refused(attach(blocked_fd, 0, 2), EBUSY);

	/* What would break an attached socket. */
	refused(setsockopt(blocked_fd, SOL_UDP, UDP_ENCAP, &type, sizeof(type)),
		EBUSY);
	refused(setsockopt(blocked_fd, SOL_SOCKET, SO_PEEK_OFF, &on,
			   sizeof(on)),
		EOPNOTSUPP);
	is(attach(six, 0, 2), 2);
	refused(setsockopt(six, SOL_IPV6, IPV6_ADDRFORM, &family,
			   sizeof(family)),
		EBUSY);
}

static void bad_requests(void)
{
	struct manylane_attach a = { .version = MANYLANE_VERSION, .fd = -1 };
	struct manylane_counts c = { .version = MANYLANE_VERSION };
	int fd = attached(AF_INET, 0, 2), plain = bound(AF_INET, NULL),
	    device = open(MANYLANE_DEVICE, O_RDWR);
	void *bad = (void *)8;

	refused(ioctl(plain, MANYLANE_COUNTS, &c), ENOTTY);
	refused(ioctl(device, MANYLANE_COUNTS, &c), ENOTTY);
	refused(ioctl(fd, MANYLANE_ATTACH, &a), ENOTTY);
	refused(ioctl(device, MANYLANE_ATTACH, bad), EFAULT);
	a.version = 2;
	refused(ioctl(device, MANYLANE_ATTACH, &a), EINVAL);
	a.version = MANYLANE_VERSION;
	a.reserved[1] = 1;
	refused(ioctl(device, MANYLANE_ATTACH, &a), EINVAL);

	refused(ioctl(fd, MANYLANE_COUNTS, bad), EFAULT);
	c.array = 8;
	c.queues = 1;
	refused(ioctl(fd, MANYLANE_COUNTS, &c), EFAULT);
	c.array = 0;
	c.queues = ~0;
	is(ioctl(fd, MANYLANE_COUNTS, &c), 0);
	is(c.queues, 2);
	c.reserved[0] = 1;
	refused(ioctl(fd, MANYLANE_COUNTS, &c), EINVAL);
	c.reserved[0] = 0;
	c.version = 0;
	refused(ioctl(fd, MANYLANE_COUNTS, &c), EINVAL);
}

static void unload(void)
{
	int fd = attached(AF_INET, 0, 2);

	refused(syscall(SYS_delete_module, "manylane", O_NONBLOCK), EAGAIN);
	is(fd >= 0, 1);
}

static void filter(void)
{
	struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
	struct sock_fprog program = { 1, &nothing };
	int fd = attached(AF_INET, 0, 2), from = sender_to(fd), on = 1;
	double end = now() + 5;

	is(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program,
		      sizeof(program)),
	   0);
	send_numbers(from, 0, 30);
	while (counts_of(fd).all.filtered < 30 && now() < end)
		usleep(1000);
	is(counts_of(fd).all.filtered, 30);
	is(setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &on, sizeof(on)), 0);
	send_numbers(from, 0, 30);
	await_arrived(fd, 30);
	is(drain(fd, NULL, 0), 30);
}

/* Multicast is UDP's: it comes through the socket's own queue, and wakes readers as well. */
static void multicast(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct ip_mreqn group = { .imr_ifindex = 1 };
	int fd = socket(AF_INET, SOCK_DGRAM, 0),
	    from = socket(AF_INET, SOCK_DGRAM, 0), i;
	socklen_t len = sizeof(to);
	ssize_t result = -1;
	pthread_t thread;

	is(bind(fd, (struct sockaddr *)&to, sizeof(to)), 0);
	is(getsockname(fd, (struct sockaddr *)&to, &len), 0);
	group.imr_multiaddr.s_addr = to.sin_addr.s_addr =
		inet_addr("239.1.2.3");
	is(setsockopt(fd, SOL_IP, IP_ADD_MEMBERSHIP, &group, sizeof(group)), 0);
	is(setsockopt(from, SOL_IP, IP_MULTICAST_IF, &group, sizeof(group)), 0);
	is(attach(fd, 0, 2), 2);
	blocked_fd = fd;
	pthread_create(&thread, NULL, block, &result);
	usleep(200000);
	for (i = 0; i < 10; i++)
		is(sendto(from, &i, 4, 0, (struct sockaddr *)&to, sizeof(to)),
		   4);
	await_arrived(fd, 10);
	pthread_join(thread, NULL);
	is(result, 4);
	is(counts_of(fd).all.left, 10);
	is(drain(fd, NULL, 0), 9);
}

/* The namespace ends with the socket. */
static void namespace(void)
{
	int fd;

	is(unshare(CLONE_NEWNET), 0);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	is(attach(fd, 0, 4), 4);
	fd = socket(AF_INET6, SOCK_DGRAM, 0);
	is(attach(fd, 0, 4), 4);
}

const struct test call_tests[] = {
	{ "poll, select and epoll", polling },
	{ "EPOLLEXCLUSIVE", polling_exclusive },
	{ "timeouts and signals", timeouts },
	{ "MSG_PEEK and SIOCINQ", peeking },
	{ "dup, fork and close", descriptors },
	{ "closed while a receive blocks", closed_while_blocked },
	{ "sockets that are refused", refused_sockets },
	{ "requests that are refused", bad_requests },
	{ "unloading is refused while a socket is attached", unload },
	{ "filter of a socket", filter },
	{ "multicast", multicast },
	{ "network namespace", namespace },
	{},
};
