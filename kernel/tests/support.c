// SPDX-License-Identifier: GPL-2.0-only
/* What the tests of the module share. */
#define _GNU_SOURCE
#include <sched.h>

#include "test.h"

double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

int cpus(void)
{
	return sysconf(_SC_NPROCESSORS_ONLN);
}

uint32_t scaled(uint32_t n)
{
	return access("/sys/kernel/debug/kmemleak", F_OK) ? n : n / 10;
}

void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	is(sched_setaffinity(0, sizeof(set), &set), 0);
}

int bound(int family, struct sockaddr_storage *name)
{
	struct sockaddr_in in4 = { .sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6,
				    .sin6_addr = IN6ADDR_LOOPBACK_INIT };
	int fd = socket(family, SOCK_DGRAM, 0), size = 4 << 20;
	struct sockaddr_storage found;
	socklen_t len = sizeof(found);

	if (fd < 0)
		fail("no socket");
	if (family == AF_INET)
		is(bind(fd, (struct sockaddr *)&in4, sizeof(in4)), 0);
	else
		is(bind(fd, (struct sockaddr *)&in6, sizeof(in6)), 0);
	is(setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size)), 0);
	is(getsockname(fd, (struct sockaddr *)&found, &len), 0);
	if (name)
		*name = found;
	return fd;
}

int sender_to(int fd)
{
	struct sockaddr_storage name;
	socklen_t len = sizeof(name);
	int from;

	is(getsockname(fd, (struct sockaddr *)&name, &len), 0);
	from = socket(name.ss_family, SOCK_DGRAM, 0);
	is(connect(from, (struct sockaddr *)&name, len), 0);
	return from;
}

int attach(int fd, unsigned int policy, unsigned int queues)
{
	struct manylane_attach args = { .version = MANYLANE_VERSION,
					.fd = fd,
					.policy = policy,
					.queues = queues };
	int device = open(MANYLANE_DEVICE, O_RDWR | O_CLOEXEC), result, error;

	if (device < 0)
		fail("no " MANYLANE_DEVICE);
	result = ioctl(device, MANYLANE_ATTACH, &args);
	error = errno;
	close(device);
	errno = error;
	return result;
}

int attached(int family, unsigned int policy, unsigned int queues)
{
	int fd = bound(family, NULL);

	is(attach(fd, policy, queues), queues ? (int)queues : cpus());
	return fd;
}

struct counted counts_of(int fd)
{
	struct counted c = {};
	unsigned int i;

	c.all.version = MANYLANE_VERSION;
	c.all.queues = QUEUES_MAX;
	c.all.array = (uintptr_t)c.queue;
	is(ioctl(fd, MANYLANE_COUNTS, &c.all), 0);
	for (i = 0; i < QUEUES_MAX; i++) {
		c.sum.arrived += c.queue[i].arrived;
		c.sum.own += c.queue[i].own;
		c.sum.stolen += c.queue[i].stolen;
		c.sum.moved += c.queue[i].moved;
		c.sum.full += c.queue[i].full;
		c.sum.no_memory += c.queue[i].no_memory;
	}
	return c;
}

void await_arrived(int fd, uint64_t n)
{
	double end = now() + 10;
	struct counted c;

	for (;;) {
		c = counts_of(fd);
		if (c.sum.arrived + c.all.left >= n)
			break;
		if (now() > end)
			fail("%llu of %llu datagrams arrived",
			     (unsigned long long)c.sum.arrived,
			     (unsigned long long)n);
		usleep(1000);
	}
	is(c.sum.arrived + c.all.left, n);
}

void send_numbers(int from, uint32_t first, uint32_t n)
{
	uint32_t i;

	for (i = first; i < first + n; i++)
		is(send(from, &i, sizeof(i), 0), sizeof(i));
}

uint32_t drain(int fd, unsigned char *seen, uint32_t seen_len)
{
	uint32_t n, number;
	ssize_t len;

	for (n = 0;; n++) {
		len = recv(fd, &number, sizeof(number), MSG_DONTWAIT);
		if (len < 0)
			break;
		is(len, sizeof(number));
		if (seen) {
			if (number >= seen_len)
				fail("number %u of %u", number, seen_len);
			seen[number]++;
		}
	}
	is(errno, EAGAIN);
	return n;
}
