// SPDX-License-Identifier: GPL-2.0-only
/* Remembered message headers. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/uio.h>

#include "test.h"

#define HEADERS 64

/* An array as recvmmsg() has it, and where results are written. */
struct array {
	struct mmsghdr header[HEADERS];
	struct manylane_result result[HEADERS];
	struct sockaddr_in name[HEADERS];
	struct iovec iov[HEADERS][2];
	uint16_t half
		[HEADERS]
		[2]; /* each datagram of four bytes is received in two pieces */
	char control[HEADERS][64];
};

static void fill(struct array *a)
{
	int i, part;

	memset(a, 0, sizeof(*a));
	for (i = 0; i < HEADERS; i++) {
		struct msghdr *m = &a->header[i].msg_hdr;

		for (part = 0; part < 2; part++)
			a->iov[i][part] =
				(struct iovec){ &a->half[i][part], 2 };
		m->msg_iov = a->iov[i];
		m->msg_iovlen = 2;
		m->msg_name = &a->name[i];
		m->msg_namelen = sizeof(a->name[i]);
		m->msg_control = a->control[i];
		m->msg_controllen = sizeof(a->control[i]);
	}
}

static int remember(int fd, struct array *a, unsigned int count)
{
	struct manylane_register args = { .version = MANYLANE_VERSION,
					  .count = count,
					  .headers = (uintptr_t)a->header,
					  .results = (uintptr_t)a->result };

	return ioctl(fd, MANYLANE_REGISTER, &args);
}

static int receive(int fd, unsigned int first, unsigned int count,
		   unsigned int flags)
{
	struct manylane_receive args = { .first = first,
					 .count = count,
					 .flags = flags };

	return ioctl(fd, MANYLANE_RECEIVE, &args);
}

static uint32_t number(const struct array *a, int i)
{
	return a->half[i][0] | (uint32_t)a->half[i][1] << 16;
}

static void check(const struct array *a, int i, int from)
{
	struct sockaddr_in name;
	socklen_t len = sizeof(name);

	is(a->result[i].len, 4);
	is(a->result[i].flags, 0);
	is(a->result[i].namelen, sizeof(name));
	is(a->result[i].controllen, CMSG_SPACE(sizeof(int)));
	is(((const struct cmsghdr *)a->control[i])->cmsg_type, IP_TTL);
	is(getsockname(from, (struct sockaddr *)&name, &len), 0);
	is(memcmp(&a->name[i], &name, sizeof(name)), 0);
}

static void by_count(void)
{
	static struct array a, b;
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 4),
	    from = sender_to(fd), on = 1;
	unsigned char seen[300] = {};
	uint32_t data, n = 0;
	int i, got;

	is(setsockopt(fd, SOL_IP, IP_RECVTTL, &on, sizeof(on)), 0);
	fill(&a);
	fill(&b);
	refused(receive(fd, 0, 1, MSG_DONTWAIT), ENOENT);
	is(remember(fd, &a, HEADERS), 0);
	/* What was remembered is what counts. */
	memset(a.header, 0xff, sizeof(a.header));
	memset(a.iov, 0xff, sizeof(a.iov));
	refused(receive(fd, 0, HEADERS, MSG_DONTWAIT), EAGAIN);

	send_numbers(from, 0, 300);
	await_arrived(fd, 300);
	/* Any number of times, beside plain receives. */
	while (n < 200) {
		got = receive(fd, 8, 50, MSG_DONTWAIT);
		is(got, 50);
		for (i = 8; i < 8 + got; i++) {
			check(&a, i, from);
			seen[number(&a, i)]++;
		}
		n += got;
		is(recv(fd, &data, 4, MSG_DONTWAIT), 4);
		seen[data]++;
		n++;
	}
	/* Another array takes the place of the first. */
	is(remember(fd, &b, 10), 0);
	refused(receive(fd, 0, 11, MSG_DONTWAIT), EINVAL);
	refused(receive(fd, 10, 1, MSG_DONTWAIT), EINVAL);
	while (n < 300) {
		got = receive(fd, 0, 10, MSG_DONTWAIT);
		is(got, n + 10 < 300 ? 10 : 300 - n);
		for (i = 0; i < got; i++) {
			check(&b, i, from);
			seen[number(&b, i)]++;
		}
		n += got;
	}
	for (i = 0; i < 300; i++)
		is(seen[i], 1);
	/* And none. */
	is(remember(fd, &b, 0), 0);
	refused(receive(fd, 0, 1, MSG_DONTWAIT), ENOENT);
}

/* Waiting, as with recvmmsg(). */
static int waiting_fd, waiting_result;
static unsigned int waiting_flags;
static void *wait_three(void *unused)
{
	waiting_result = receive(waiting_fd, 0, 3, waiting_flags);
	return unused;
}
static void waiting(void)
{
	static struct array a;
	static const unsigned int flags[] = { 0, MSG_WAITFORONE };
	int i, fd = attached(AF_INET, 0, 2), from = sender_to(fd);
	struct timeval limit = { .tv_usec = 100000 };
	pthread_t thread;

	fill(&a);
	is(remember(fd, &a, 8), 0);
	waiting_fd = fd;
	for (i = 0; i < 2; i++) {
		waiting_flags = flags[i];
		waiting_result = -1;
		pthread_create(&thread, NULL, wait_three, NULL);
		usleep(200000);
		send_numbers(from, 0, 1);
		usleep(200000);
		is(waiting_result, i ? 1 : -1);
		if (!i)
			send_numbers(from, 1, 2);
		pthread_join(thread, NULL);
		is(waiting_result, i ? 1 : 3);
	}
	/* A timeout ends the call with what there is. */
	is(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
	send_numbers(from, 0, 2);
	is(receive(fd, 0, 5, 0), 2);
	refused(receive(fd, 0, 5, 0), EAGAIN);
}

/* Threads receive at once, into different parts; another one registers again and again. */
static struct array shared;
static unsigned char seen[40000];
static uint32_t total;
static int threads_fd, stop;

static void *receiver(void *argument)
{
	unsigned int part = (uintptr_t)argument, i;
	int got;

	while ((got = receive(threads_fd, 8 * part, 8, MSG_WAITFORONE)) > 0) {
		for (i = 8 * part; i < 8 * part + got; i++) {
			/* After shutdown(). */
			if (!shared.result[i].len)
				return NULL;
			is(shared.result[i].len, 4);
			__atomic_add_fetch(&seen[number(&shared, i)], 1,
					   __ATOMIC_RELAXED);
			__atomic_add_fetch(&total, 1, __ATOMIC_RELAXED);
		}
	}
	is(got, 0);
	return NULL;
}

static void *again(void *unused)
{
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
		is(remember(threads_fd, &shared, HEADERS), 0);
	return unused;
}

static void threads(void)
{
	pthread_t thread[8], registers;
	uint32_t i, n = scaled(20000);
	double end;
	int from;

	threads_fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 0);
	from = sender_to(threads_fd);
	fill(&shared);
	is(remember(threads_fd, &shared, HEADERS), 0);
	for (i = 0; i < 8; i++)
		pthread_create(&thread[i], NULL, receiver,
			       (void *)(uintptr_t)i);
	pthread_create(&registers, NULL, again, NULL);
	for (i = 0; i < n; i += 500) {
		send_numbers(from, i, 500);
		end = now() + 20;
		while (__atomic_load_n(&total, __ATOMIC_RELAXED) < i + 500) {
			if (now() > end)
				fail("%u of %u datagrams were received", total,
				     i + 500);
			usleep(100);
		}
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	pthread_join(registers, NULL);
	refused(shutdown(threads_fd, SHUT_RD), ENOTCONN);
	for (i = 0; i < 8; i++)
		pthread_join(thread[i], NULL);
	for (i = 0; i < n; i++)
		is(seen[i], 1);
	is(counts_of(threads_fd).sum.own + counts_of(threads_fd).sum.stolen, n);
}

/* The addresses mean something else in another process. */
static void other_process(void)
{
	static struct array a, b;
	int fd = attached(AF_INET, 0, 2), from = sender_to(fd), status;

	fill(&a);
	is(remember(fd, &a, 4), 0);
	send_numbers(from, 5, 1);
	await_arrived(fd, 1);
	if (!fork()) {
		refused(receive(fd, 0, 1, MSG_DONTWAIT), EXDEV);
		fill(&b);
		is(remember(fd, &b, 4), 0);
		is(receive(fd, 0, 1, MSG_DONTWAIT), 1);
		is(number(&b, 0), 5);
		_exit(0);
	}
	wait(&status);
	is(status, 0);
	refused(receive(fd, 0, 1, MSG_DONTWAIT), EXDEV);
	is(remember(fd, &a, 4), 0);
	refused(receive(fd, 0, 1, MSG_DONTWAIT), EAGAIN);
}

static void closed_while_blocked(void)
{
	static struct array a;
	pthread_t thread;
	int from;

	fill(&a);
	waiting_fd = attached(AF_INET, 0, 2);
	from = sender_to(waiting_fd);
	waiting_flags = MSG_WAITFORONE;
	is(remember(waiting_fd, &a, 4), 0);
	pthread_create(&thread, NULL, wait_three, NULL);
	usleep(200000);
	close(waiting_fd);
	send_numbers(from, 1, 1);
	pthread_join(thread, NULL);
	is(waiting_result, 1);
	is(number(&a, 0), 1);
}

static void bad_requests(void)
{
	static struct array a;
	static struct iovec many[1025];
	static struct mmsghdr large[MANYLANE_HEADERS_MAX];
	struct manylane_register r = { .version = MANYLANE_VERSION,
				       .count = 1 };
	struct manylane_receive v = { .count = 1, .flags = MSG_DONTWAIT };
	int fd = attached(AF_INET, 0, 2), from = sender_to(fd), i;
	void *bad = (void *)8, *gone;

	fill(&a);
	refused(ioctl(fd, MANYLANE_REGISTER, bad), EFAULT);
	refused(ioctl(fd, MANYLANE_RECEIVE, bad), EFAULT);
	refused(ioctl(fd, MANYLANE_REGISTER, &r), EFAULT);
	r.headers = (uintptr_t)a.header;
	r.version = 9;
	refused(ioctl(fd, MANYLANE_REGISTER, &r), EINVAL);
	r.version = MANYLANE_VERSION;
	r.reserved[0] = 1;
	refused(ioctl(fd, MANYLANE_REGISTER, &r), EINVAL);
	r.reserved[0] = 0;
	r.count = MANYLANE_HEADERS_MAX + 1;
	refused(ioctl(fd, MANYLANE_REGISTER, &r), E2BIG);
	r.count = ~0;
	refused(ioctl(fd, MANYLANE_REGISTER, &r), E2BIG);

	a.header[3].msg_hdr.msg_iov = bad;
	refused(remember(fd, &a, 4), EFAULT);
	a.header[3].msg_hdr.msg_iov = many;
	a.header[3].msg_hdr.msg_iovlen = 1025;
	refused(remember(fd, &a, 4), EMSGSIZE);
	a.header[3].msg_hdr.msg_iovlen = 2;
	many[1].iov_len = ~0UL;
	refused(remember(fd, &a, 4), EINVAL);
	many[1] = (struct iovec){ (void *)~0xfffUL, 100 };
	refused(remember(fd, &a, 4), EFAULT);
	fill(&a);
	a.header[0].msg_hdr.msg_namelen = -1;
	refused(remember(fd, &a, 1), EINVAL);
	a.header[0].msg_hdr.msg_namelen = 0;
	a.header[0].msg_hdr.msg_controllen = ~0UL;
	refused(remember(fd, &a, 1), EINVAL);
	/* All of those left nothing behind. */
	refused(receive(fd, 0, 1, MSG_DONTWAIT), ENOENT);

	/* The sum of all segments is bounded. */
	memset(many, 0, sizeof(many));
	for (i = 0; i < MANYLANE_HEADERS_MAX; i++) {
		large[i].msg_hdr.msg_iov = many;
		large[i].msg_hdr.msg_iovlen = i < 200 ? 1024 : 0;
	}
	r.count = MANYLANE_HEADERS_MAX;
	r.headers = (uintptr_t)large;
	refused(ioctl(fd, MANYLANE_REGISTER, &r), E2BIG);
	for (i = 0; i < MANYLANE_HEADERS_MAX; i++)
		large[i].msg_hdr.msg_iovlen = 0;
	is(ioctl(fd, MANYLANE_REGISTER, &r), 0);

	fill(&a);
	is(remember(fd, &a, 4), 0);
	v.reserved = 1;
	refused(ioctl(fd, MANYLANE_RECEIVE, &v), EINVAL);
	v.reserved = 0;
	v.count = 0;
	refused(ioctl(fd, MANYLANE_RECEIVE, &v), EINVAL);
	refused(receive(fd, ~0U, 2, MSG_DONTWAIT), EINVAL);
	refused(receive(fd, 1, ~0U, MSG_DONTWAIT), EINVAL);
	refused(receive(fd, 0, 1, MSG_DONTWAIT | MSG_PEEK), EINVAL);
	refused(receive(fd, 0, 1, ~0U), EINVAL);

	/* Memory that is gone by the time of the receive: only the datagram is lost. */
	gone = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	a.iov[1][0].iov_base = gone;
	is(remember(fd, &a, 4), 0);
	munmap(gone, 4096);
	send_numbers(from, 0, 3);
	await_arrived(fd, 3);
	is(receive(fd, 0, 3, MSG_DONTWAIT), 1);
	refused(receive(fd, 0, 1, MSG_DONTWAIT), EFAULT);
	is(receive(fd, 0, 3, MSG_DONTWAIT), 1);
}

const struct test header_tests[] = {
	{ "remembered headers, by count", by_count },
	{ "remembered headers, waiting", waiting },
	{ "remembered headers, threads and new registrations", threads },
	{ "remembered headers, another process", other_process },
	{ "remembered headers, closed while a receive blocks",
	  closed_while_blocked },
	{ "remembered headers, requests that are refused", bad_requests },
	{},
};
