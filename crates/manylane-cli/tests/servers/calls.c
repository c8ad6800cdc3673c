/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a program sees of a socket whose datagrams are in a device's queue: the
 * same as of a kernel socket. It prints what it sees.
 *
 *	calls CLIENTS-NAMESPACE IPV4 IPV6 WHAT
 *
 * Its clients live in the other host's namespace. They and the fence make their
 * system calls directly, so that no library knows of them. There is one device
 * queue and one CPU: datagrams arrive in order, and when the fence has got its
 * datagram, all earlier ones have arrived.
 */
#include "calls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FENCE 6999

const char *ip4, *ip6;
int there, server, clients[2];
in_port_t ports[2];
union address to;
socklen_t to_len;
static int here, fence;
static union address to_fence;

void fail(const char *what)
{
	perror(what);
	exit(1);
}

int open_hidden_socket(int namespace, int family, int type, int protocol)
{
	int fd;

	if (setns(namespace, CLONE_NEWNET))
		fail("setns");
	fd = syscall(SYS_socket, family, type, protocol);
	if (fd < 0 || setns(here, CLONE_NEWNET))
		fail("socket");
	return fd;
}

socklen_t address(union address *at, const char *ip, int port)
{
	memset(at, 0, sizeof(*at));
	if (strchr(ip, ':')) {
		at->v6.sin6_family = AF_INET6;
		at->v6.sin6_port = htons(port);
		inet_pton(AF_INET6, ip, &at->v6.sin6_addr);
		return sizeof(at->v6);
	}
	at->v4.sin_family = AF_INET;
	at->v4.sin_port = htons(port);
	inet_pton(AF_INET, ip, &at->v4.sin_addr);
	return sizeof(at->v4);
}

void send_by_client(int client, const void *data, size_t len)
{
	if (syscall(SYS_sendto, clients[client], data, len, 0, &to, to_len) !=
	    (long)len)
		fail("sendto");
}

void wait_for_arrival(void)
{
	char byte;

	if (syscall(SYS_sendto, clients[0], "f", 1, 0, &to_fence, to_len) != 1)
		fail("fence");
	if (syscall(SYS_recvfrom, fence, &byte, 1, 0, NULL, NULL) != 1)
		fail("fence");
}

size_t length(int n)
{
	return 8 + n * 7 % 300;
}

void send_number(int n)
{
	char data[1000];

	memset(data, 'a' + n % 26, sizeof(data));
	memcpy(data, &n, sizeof(n));
	send_by_client(n & 1, data, length(n));
}

int is_number(int n, const char *data, ssize_t len)
{
	int is;

	memcpy(&is, data, sizeof(is));
	return len == (ssize_t)length(n) && is == n &&
	       data[len - 1] == 'a' + n % 26;
}

int from_client(const union address *from, int client)
{
	return from->any.sa_family == AF_INET6 ?
		       from->v6.sin6_port == ports[client] :
		       from->v4.sin_port == ports[client];
}

int receive_numbers(int fd, int first, int end)
{
	char data[2000];
	int n, right = 0;

	for (n = first; n < end; n++) {
		union address from;
		socklen_t len = sizeof(from);
		ssize_t got =
			recvfrom(fd, data, sizeof(data), 0, &from.any, &len);

		if (got < 0)
			fail("recvfrom");
		right += is_number(n, data, got) && from_client(&from, n & 1);
	}
	return right;
}

int is_empty(int fd)
{
	char byte;

	return recv(fd, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN;
}

void open_server(const char *ip, const char *ask, int port)
{
	union address local;
	socklen_t len = address(&local, ip, port);
	int i, room = 4 << 20;

	to_len = address(&to, ask, port);
	address(&to_fence, ask, FENCE);
	for (i = 0; i < 2; i++) {
		union address any;
		socklen_t any_len = address(
			&any, to_len == sizeof(any.v4) ? "0.0.0.0" : "::", 0);

		clients[i] = open_hidden_socket(there, to.any.sa_family,
						SOCK_DGRAM, 0);
		if (syscall(SYS_bind, clients[i], &any, any_len) ||
		    syscall(SYS_getsockname, clients[i], &any, &any_len))
			fail("client");
		ports[i] = any_len == sizeof(any.v4) ? any.v4.sin_port :
						       any.v6.sin6_port;
	}
	fence = open_hidden_socket(here, to.any.sa_family, SOCK_DGRAM, 0);
	if (syscall(SYS_bind, fence, &to_fence, to_len))
		fail("bind");
	server = socket(local.any.sa_family, SOCK_DGRAM, 0);
	/* Room for all, however much memory the kernel accounts for each. */
	if (server < 0 ||
	    setsockopt(server, SOL_SOCKET, SO_RCVBUFFORCE, &room,
		       sizeof(room)) ||
	    bind(server, &local.any, len))
		fail("bind");
}

void warm_up(void)
{
	int n;

	for (n = 0; n < 3; n++) {
		send_number(n);
		if (receive_numbers(server, n, n + 1) != 1)
			printf("  warm-up: no\n");
	}
}

void close_server(void)
{
	int i;

	close(server);
	syscall(SYS_close, fence);
	for (i = 0; i < 2; i++)
		syscall(SYS_close, clients[i]);
}

void begin_test(const char *name, int port)
{
	printf("%s\n", name);
	open_server(ip4, ip4, port);
	warm_up();
}

void send_all_numbers(void)
{
	int n;

	for (n = 0; n < QUEUED_DATAGRAMS; n++)
		send_number(n);
	wait_for_arrival();
}

void check_plain(void)
{
	int n;

	for (n = QUEUED_DATAGRAMS; n < QUEUED_DATAGRAMS + 10; n++)
		send_number(n);
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS + 10) ==
	      QUEUED_DATAGRAMS + 10);
	CHECK(is_empty(server));
}

int main(int argc, char **argv)
{
	cpu_set_t cpus, one;
	int i;

	if (argc != 5)
		return 2;
	alarm(300);
	setvbuf(stdout, NULL, _IOLBF, 0);
	here = open("/proc/self/ns/net", O_RDONLY);
	there = open(argv[1], O_RDONLY);
	if (here < 0 || there < 0)
		fail("namespace");
	ip4 = argv[2];
	ip6 = argv[3];
	sched_getaffinity(0, sizeof(cpus), &cpus);
	for (i = 0; !CPU_ISSET(i, &cpus); i++)
		;
	CPU_ZERO(&one);
	CPU_SET(i, &one);
	sched_setaffinity(0, sizeof(one), &one);
	if (!strcmp(argv[4], "fallbacks")) {
		test_fallbacks();
	} else if (!strcmp(argv[4], "calls")) {
		calls();
	} else if (!strcmp(argv[4], "closes")) {
		test_closes();
	} else if (!strcmp(argv[4], "reopened")) {
		test_reopened(7071);
	} else if (!strcmp(argv[4], "killed")) {
		test_killed(7081);
	} else if (!strcmp(argv[4], "ended")) {
		test_thread_end(7091);
	} else if (!strcmp(argv[4], "threads")) {
		test_threads();
	} else if (!strcmp(argv[4], "interrupted")) {
		test_interrupts(7041);
	} else if (!strcmp(argv[4], "restarted")) {
		test_restarts(7051);
	} else if (!strcmp(argv[4], "small")) {
		test_small_stack(7101);
	} else if (!strcmp(argv[4], "epoll")) {
		test_epoll_entries(7111);
	}
	return 0;
}
