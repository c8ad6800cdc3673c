/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What an instance of epoll reports of a socket with queues, and what the kernel watches in it. */
#include "calls.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

/* More than the waits among which one asks the kernel while frames are queued. */
#define WAITS 16

/* Entries of an instance: a library may add one for the queue, while it has one. */
static int has_entries(int epoll, int own, int queues)
{
	char path[64], line[256];
	int count = 0;
	FILE *info;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", epoll);
	info = fopen(path, "r");
	if (!info)
		fail(path);
	while (fgets(line, sizeof(line), info))
		count += !strncmp(line, "tfd:", 4);
	fclose(info);
	return count == own + (getenv("MANYLANE_LEASE_SOCKET") ? queues : 0);
}

/* Waits that report one event, which is that the entry with this data is readable. */
static int reports(int epoll, uint64_t data)
{
	struct epoll_event events[8];
	int i, right = 0;

	for (i = 0; i < WAITS; i++)
		right += epoll_wait(epoll, events, 8, 0) == 1 &&
			 events[0].events == EPOLLIN &&
			 events[0].data.u64 == data;
	return right;
}

static int is_silent(int epoll, int ms)
{
	struct epoll_event event;

	return epoll_wait(epoll, &event, 1, ms) == 0;
}

static void change(int epoll, int op, uint32_t events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };

	CHECK(epoll_ctl(epoll, op, server, &event) == 0);
}

/* One datagram through the queue, and one past it. */
static void send_both_ways(void)
{
	int local = syscall(SYS_socket, to.any.sa_family, SOCK_DGRAM, 0);

	send_number(0);
	wait_for_arrival();
	if (syscall(SYS_sendto, local, "local", 5, 0, &to, to_len) != 5)
		fail("sendto");
	syscall(SYS_close, local);
}

static void receive(int count)
{
	char data[1000];

	for (; count > 0; count--)
		CHECK(recv(server, data, sizeof(data), MSG_DONTWAIT) > 0);
}

void test_epoll_entries(int port)
{
	int on = 1, n, epoll = epoll_create1(0);

	begin_test("epoll", port);
	change(epoll, EPOLL_CTL_ADD, EPOLLIN, 1);
	CHECK(is_silent(epoll, 0));
	CHECK(has_entries(epoll, 1, 1));
	send_both_ways();
	CHECK(reports(epoll, 1) == WAITS);
	change(epoll, EPOLL_CTL_MOD, EPOLLIN, 2);
	CHECK(reports(epoll, 2) == WAITS);
	change(epoll, EPOLL_CTL_MOD, 0, 2);
	CHECK(has_entries(epoll, 1, 0));
	CHECK(is_silent(epoll, 0));
	change(epoll, EPOLL_CTL_MOD, EPOLLIN, 3);
	CHECK(has_entries(epoll, 1, 1));
	CHECK(reports(epoll, 3) == WAITS);
	receive(2);
	CHECK(is_silent(epoll, 0));
	send_both_ways();
	change(epoll, EPOLL_CTL_DEL, 0, 0);
	CHECK(has_entries(epoll, 0, 0));
	CHECK(is_silent(epoll, 0));
	/* What is queued already, and what comes while the queue is watched. */
	change(epoll, EPOLL_CTL_ADD, EPOLLIN, 4);
	send_both_ways();
	CHECK(has_entries(epoll, 1, 1));
	CHECK(reports(epoll, 4) == WAITS);
	receive(4);
	CHECK(is_silent(epoll, 0));
	close_server();
	CHECK(has_entries(epoll, 0, 0));

	/* Closed with datagrams queued. */
	open_server(ip4, ip4, port + 1);
	warm_up();
	change(epoll, EPOLL_CTL_ADD, EPOLLIN, 5);
	CHECK(is_silent(epoll, 0));
	for (n = 0; n < 20; n++)
		send_number(n);
	wait_for_arrival();
	CHECK(reports(epoll, 5) == WAITS);
	close(server);
	CHECK(has_entries(epoll, 0, 0));
	CHECK(is_silent(epoll, 50));
	server = -1;
	close_server();

	/* A plain socket is watched without its queue. */
	open_server(ip4, ip4, port + 2);
	warm_up();
	change(epoll, EPOLL_CTL_ADD, EPOLLIN, 6);
	CHECK(is_silent(epoll, 0));
	send_all_numbers();
	CHECK(reports(epoll, 6) == WAITS);
	CHECK(setsockopt(server, IPPROTO_IP, IP_RECVERR, &on, sizeof(on)) == 0);
	CHECK(has_entries(epoll, 1, 0));
	CHECK(reports(epoll, 6) == WAITS);
	check_plain();
	CHECK(is_silent(epoll, 0));
	close_server();
	close(epoll);
}
