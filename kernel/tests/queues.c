// SPDX-License-Identifier: GPL-2.0-only
/* Which queue gets a datagram, who takes it, and what happens when a queue is full. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>

#include "test.h"

static void round_robin(void)
{
	static const int families[] = { AF_INET, AF_INET6 };
	unsigned char seen[4003];
	unsigned int i, q;

	for (i = 0; i < 2; i++) {
		int fd = attached(families[i], MANYLANE_ROUND_ROBIN, 4);
		int from = sender_to(fd);
		struct counted c;

		memset(seen, 0, sizeof(seen));
		send_numbers(from, 0, 4003);
		await_arrived(fd, 4003);
		c = counts_of(fd);
		for (q = 0; q < 4; q++)
			is(c.queue[q].arrived, q < 3 ? 1001 : 1000);
		is(drain(fd, seen, 4003), 4003);
		for (q = 0; q < 4003; q++)
			is(seen[q], 1);
		c = counts_of(fd);
		is(c.sum.own + c.sum.stolen, 4003);
		is(c.sum.full + c.sum.no_memory + c.sum.moved, 0);
		is(c.all.left, 0);
		close(from);
		close(fd);
	}
}

/* All of a flow is in one queue, in order; flows are in more than one. */
static void flow(void)
{
	int families[] = { AF_INET, AF_INET6 }, used = 0;
	unsigned int family, f, q;

	for (family = 0; family < 2; family++) {
		int fd = attached(families[family], MANYLANE_FLOW, 4);

		for (f = 0; f < 32; f++) {
			struct counted before = counts_of(fd), after;
			int from = sender_to(fd), grown = 0;
			uint32_t number, i;

			send_numbers(from, 0, 25);
			await_arrived(fd, 25 * (f + 1));
			after = counts_of(fd);
			for (q = 0; q < 4; q++) {
				uint64_t n = after.queue[q].arrived -
					     before.queue[q].arrived;

				if (!n)
					continue;
				is(n, 25);
				grown++;
				used |= 1 << q;
			}
			is(grown, 1);
			for (i = 0; i < 25; i++) {
				is(recv(fd, &number, 4, MSG_DONTWAIT), 4);
				is(number, i);
			}
			close(from);
		}
		close(fd);
	}
	if (!(used & (used - 1)))
		fail("64 flows were all in one queue");
}

/* A reader takes from the queue of its processor while that has something, then from others. */
static void own_queue_first(void)
{
	int n = cpus(), fd, from, cpu, i;
	struct counted c;
	uint32_t number;

	if (n > QUEUES_MAX)
		n = QUEUES_MAX;
	for (cpu = 0; cpu < n; cpu++) {
		pin(cpu);
		fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, n);
		from = sender_to(fd);
		send_numbers(from, 0, 10 * n);
		await_arrived(fd, 10 * n);
		for (i = 0; i < 10; i++) {
			is(recv(fd, &number, 4, MSG_DONTWAIT), 4);
			is(number, i * n + cpu);
		}
		c = counts_of(fd);
		is(c.sum.own, 10);
		is(c.queue[cpu].own, 10);
		is(c.sum.stolen, 0);
		is(drain(fd, NULL, 0), 10 * n - 10);
		c = counts_of(fd);
		is(c.sum.own, 10);
		is(c.sum.stolen, 10 * n - 10);
		close(from);
		close(fd);
	}
}

#define THREADS 8
#define MANY 20000

static unsigned char taken[MANY];
static uint32_t taken_total;
static int shared_fd;

static void *reader(void *unused)
{
	uint32_t number;

	while (recv(shared_fd, &number, sizeof(number), 0) == sizeof(number)) {
		__atomic_add_fetch(&taken[number], 1, __ATOMIC_RELAXED);
		__atomic_add_fetch(&taken_total, 1, __ATOMIC_RELAXED);
	}
	return unused;
}

static void await_taken(uint32_t n)
{
	double end = now() + 20;

	while (__atomic_load_n(&taken_total, __ATOMIC_RELAXED) < n) {
		if (now() > end)
			fail("%u of %u datagrams were taken", taken_total, n);
		sched_yield();
	}
}

/* Threads that read one descriptor get each datagram once, and all of them. */
static void threads_on(int fd, unsigned int policy, uint32_t n,
		       uint32_t at_once, int attach_now)
{
	pthread_t thread[THREADS];
	struct counted c;
	uint32_t i;
	int from;

	shared_fd = fd;
	from = sender_to(shared_fd);
	memset(taken, 0, sizeof(taken));
	taken_total = 0;
	for (i = 0; i < THREADS; i++)
		is(pthread_create(&thread[i], NULL, reader, NULL), 0);
	if (attach_now) {
		usleep(200000);
		is(attach(fd, policy, 0), cpus());
	}
	for (i = 0; i < n; i += at_once) {
		send_numbers(from, i, at_once);
		await_taken(i + at_once);
	}
	/* Wakes all of them, and they receive nothing. */
	refused(shutdown(shared_fd, SHUT_RD), ENOTCONN);
	for (i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	for (i = 0; i < n; i++)
		is(taken[i], 1);
	c = counts_of(shared_fd);
	is(c.sum.arrived + c.all.left, n);
	is(c.sum.own + c.sum.stolen, c.sum.arrived);
	/* Each thread that was there before got one so. */
	if (attach_now ? c.all.left < THREADS : c.all.left)
		fail("%llu were left to UDP", (unsigned long long)c.all.left);
	close(from);
	close(shared_fd);
}

static void threads(unsigned int policy, uint32_t n, uint32_t at_once)
{
	threads_on(attached(AF_INET, policy, 0), policy, n, at_once, 0);
}

/* They block in UDP's own receive, which no queue wakes. */
static void threads_before(void)
{
	threads_on(bound(AF_INET, NULL), MANYLANE_ROUND_ROBIN, scaled(5000), 1,
		   1);
}

static void threads_round_robin(void)
{
	threads(MANYLANE_ROUND_ROBIN, scaled(MANY), 1000);
}
static void threads_flow(void)
{
	threads(MANYLANE_FLOW, scaled(MANY), 1000);
}
/* All readers sleep when the datagram comes: one that wakes nobody is not taken. */
static void sleepers(void)
{
	threads(MANYLANE_ROUND_ROBIN, scaled(5000), 1);
}
static void sleepers_in_bursts(void)
{
	threads(MANYLANE_ROUND_ROBIN, scaled(6000), 3);
}

static unsigned long snmp(const char *name)
{
	char names[1024], values[1024], *n, *v, *np, *vp;
	FILE *file = fopen("/proc/net/snmp", "r");

	while (fgets(names, sizeof(names), file)) {
		if (!fgets(values, sizeof(values), file))
			break;
		if (strncmp(names, "Udp: ", 5))
			continue;
		n = strtok_r(names, " \n", &np);
		v = strtok_r(values, " \n", &vp);
		while (n && v) {
			if (!strcmp(n, name)) {
				fclose(file);
				return strtoul(v, NULL, 10);
			}
			n = strtok_r(NULL, " \n", &np);
			v = strtok_r(NULL, " \n", &vp);
		}
	}
	fail("no %s", name);
}

/* Each datagram is in a queue, or was dropped and counted, once. */
static void full(void)
{
	unsigned long received = snmp("InDatagrams"),
		      dropped = snmp("RcvbufErrors"), errors = snmp("InErrors");
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 2),
	    from = sender_to(fd);
	char control[64], data[4];
	struct iovec iov = { data, sizeof(data) };
	struct msghdr msg = { .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control };
	int size = 8192, on = 1, i;
	struct counted c;
	uint64_t queued;

	is(setsockopt(fd, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof(on)), 0);
	is(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size)), 0);
	send_numbers(from, 0, 1000);
	await_arrived(fd, 1000);
	c = counts_of(fd);
	for (i = 0; i < 2; i++) {
		is(c.queue[i].arrived, 500);
		if (!c.queue[i].full || c.queue[i].full >= 500)
			fail("%llu drops in queue %d",
			     (unsigned long long)c.queue[i].full, i);
	}
	queued = 1000 - c.sum.full;
	msg.msg_controllen = sizeof(control);
	is(recvmsg(fd, &msg, MSG_DONTWAIT), 4);
	is(CMSG_FIRSTHDR(&msg)->cmsg_type, SO_RXQ_OVFL);
	is(*(uint32_t *)CMSG_DATA(CMSG_FIRSTHDR(&msg)), c.sum.full);
	is(drain(fd, NULL, 0), queued - 1);
	is(snmp("InDatagrams") - received, queued);
	is(snmp("RcvbufErrors") - dropped, c.sum.full);
	is(snmp("InErrors") - errors, c.sum.full);

	/* A larger buffer holds from now on. */
	size = 1 << 20;
	is(setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size)), 0);
	send_numbers(from, 0, 1000);
	await_arrived(fd, 2000);
	is(counts_of(fd).sum.full, c.sum.full);
	is(drain(fd, NULL, 0), 1000);
}

/* What was queued before is received first, and all readers see it. */
static void queued_before(void)
{
	int fd = bound(AF_INET, NULL), from = sender_to(fd);
	struct pollfd p = { .fd = fd, .events = POLLIN };
	unsigned char seen[20] = {};
	uint32_t number, i;

	send_numbers(from, 0, 10);
	is(poll(&p, 1, 5000), 1);
	usleep(50000);
	is(attach(fd, MANYLANE_ROUND_ROBIN, 2), 2);
	is(poll(&p, 1, 0), 1);
	send_numbers(from, 10, 10);
	await_arrived(fd, 10);
	for (i = 0; i < 10; i++) {
		is(recv(fd, &number, 4, MSG_DONTWAIT), 4);
		is(number, i);
	}
	is(drain(fd, seen, 20), 10);
	for (i = 10; i < 20; i++)
		is(seen[i], 1);
}

/* Closed, with datagrams in queues; run() checks that the module is free again. */
static void closed_with_data(void)
{
	int fd = attached(AF_INET, MANYLANE_ROUND_ROBIN, 4),
	    from = sender_to(fd);

	send_numbers(from, 0, 1000);
	await_arrived(fd, 1000);
	close(fd);
	send_numbers(from, 0, 1);
}

static void never_bound(void)
{
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	is(attach(fd, MANYLANE_ROUND_ROBIN, 2), 2);
	refused(recv(fd, &fd, 1, MSG_DONTWAIT), EAGAIN);
	close(fd);
}

const struct test queue_tests[] = {
	{ "round robin is exact", round_robin },
	{ "a flow stays in one queue", flow },
	{ "own queue first, then others", own_queue_first },
	{ "threads get each datagram once, round robin", threads_round_robin },
	{ "threads get each datagram once, flow", threads_flow },
	{ "each datagram wakes a sleeper", sleepers },
	{ "bursts wake sleepers", sleepers_in_bursts },
	{ "threads that block when the socket is attached", threads_before },
	{ "drops of full queues are exact", full },
	{ "datagrams queued before attaching", queued_before },
	{ "closed with datagrams queued", closed_with_data },
	{ "a socket that is not bound", never_bound },
	{},
};
