/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The results of single calls, and the queue after a fallback. */
#include "calls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <linux/filter.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* More than the kernel sends with one call. */
#define MESSAGES 1030

static int raw;

static void fallback_by_connect(int port)
{
	union address peer;
	socklen_t len = sizeof(peer);
	char data[2000];

	begin_test("connect", port);
	send_by_client(0, "peer", 4);
	CHECK(recvfrom(server, data, sizeof(data), 0, &peer.any, &len) == 4);
	send_all_numbers();
	CHECK(connect(server, &peer.any, len) == 0);
	send_by_client(1, "other", 5);
	send_by_client(0, "same", 4);
	wait_for_arrival();
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	CHECK(recv(server, data, sizeof(data), 0) == 4 &&
	      !memcmp(data, "same", 4));
	CHECK(is_empty(server));
	close_server();
}

static void fallback_by_option(int port)
{
	int one = 1;

	begin_test("option", port);
	send_all_numbers();
	CHECK(setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &one, sizeof(one)) ==
	      0);
	check_plain();
	close_server();
}

static void fallback_by_control(int port)
{
	int tos = 0x10;

	begin_test("control", port);
	send_all_numbers();
	CHECK(setsockopt(server, SOL_IP, IP_TOS, &tos, sizeof(tos)) == 0);
	check_plain();
	close_server();
}

static void fallback_by_filter(int port)
{
	/* Drops everything. */
	struct sock_filter none = BPF_STMT(BPF_RET | BPF_K, 0);
	struct sock_fprog program = { .len = 1, .filter = &none };

	begin_test("filter", port);
	send_all_numbers();
	CHECK(setsockopt(server, SOL_SOCKET, SO_ATTACH_FILTER, &program,
			 sizeof(program)) == 0);
	send_number(QUEUED_DATAGRAMS);
	wait_for_arrival();
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	CHECK(is_empty(server));
	close_server();
}

static void fallback_by_multicast(int port)
{
	struct ip_mreq group = { .imr_multiaddr.s_addr = htonl(0xef010203) };

	inet_pton(AF_INET, ip4, &group.imr_interface);
	begin_test("multicast", port);
	send_all_numbers();
	CHECK(setsockopt(server, SOL_IP, IP_ADD_MEMBERSHIP, &group,
			 sizeof(group)) == 0);
	check_plain();
	close_server();
}

static void fallback_while_peeking(int port)
{
	char data[2000];
	int one = 1, size;

	begin_test("peek, then fall", port);
	send_all_numbers();
	CHECK(recv(server, data, sizeof(data), MSG_PEEK) ==
		      (ssize_t)length(0) &&
	      is_number(0, data, length(0)));
	CHECK(setsockopt(server, SOL_IP, IP_RECVERR, &one, sizeof(one)) == 0);
	CHECK(recv(server, data, sizeof(data), MSG_PEEK) ==
		      (ssize_t)length(0) &&
	      is_number(0, data, length(0)));
	CHECK(ioctl(server, FIONREAD, &size) == 0 && size == (int)length(0));
	check_plain();
	close_server();
}

static void polls(int port)
{
	struct pollfd at = { .events = POLLIN };
	int one = 1;

	begin_test("fall, then poll", port);
	send_all_numbers();
	CHECK(setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &one, sizeof(one)) ==
	      0);
	at.fd = server;
	CHECK(poll(&at, 1, -1) == 1 && at.revents == POLLIN);
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	CHECK(poll(&at, 1, 0) == 0);
	close_server();
}

static void messages(int port)
{
	enum {
		COUNT = 8
	};
	static char data[COUNT][2000];
	struct mmsghdr all[COUNT];
	struct iovec pieces[COUNT][2];
	union address from[COUNT];
	char control[64], byte;
	int i, right = 0, size;

	begin_test("messages", port);
	send_all_numbers();
	CHECK(ioctl(server, FIONREAD, &size) == 0 && size == (int)length(0));
	CHECK(recv(server, data[0], 5, MSG_PEEK) == 5);
	CHECK(recv(server, data[0], 5, MSG_PEEK | MSG_TRUNC) ==
	      (ssize_t)length(0));
	CHECK(recv(server, data[0], 5, MSG_TRUNC) == (ssize_t)length(0));
	CHECK(recv(server, data[0], 5, 0) == 5);
	CHECK(recv(server, NULL, 0, 0) == 0);
	CHECK(recv(server, NULL, 0, MSG_TRUNC) == (ssize_t)length(3));
	/* Into several pieces: the first one is too small. */
	for (i = 0; i < COUNT; i++) {
		pieces[i][0] = (struct iovec){ data[i], 6 };
		pieces[i][1] = (struct iovec){ data[i] + 6, sizeof(*data) - 6 };
	}
	CHECK(readv(server, pieces[0], 2) == (ssize_t)length(4) &&
	      is_number(4, data[0], length(4)));
	CHECK(read(server, data[0], sizeof(*data)) == (ssize_t)length(5) &&
	      is_number(5, data[0], length(5)));
	CHECK(readv(server, pieces[0], 1) == 6);
	memset(all, 0, sizeof(all));
	for (i = 0; i < COUNT; i++) {
		all[i].msg_hdr.msg_iov = pieces[i];
		all[i].msg_hdr.msg_iovlen = i == 3 ? 1 : 2;
		all[i].msg_hdr.msg_name = &from[i];
		all[i].msg_hdr.msg_namelen = sizeof(from[i]);
		all[i].msg_hdr.msg_control = control;
		all[i].msg_hdr.msg_controllen = sizeof(control);
	}
	CHECK(recvmmsg(server, all, COUNT, 0, NULL) == COUNT);
	for (i = 0; i < COUNT; i++) {
		const struct msghdr *one = &all[i].msg_hdr;
		int cut = i == 3;

		right += all[i].msg_len == (cut ? 6 : length(7 + i)) &&
			 (cut || is_number(7 + i, data[i], all[i].msg_len)) &&
			 one->msg_flags == (cut ? MSG_TRUNC : 0) &&
			 one->msg_controllen == 0 &&
			 one->msg_namelen == sizeof(from[i].v4) &&
			 from_client(&from[i], (7 + i) & 1);
	}
	CHECK(right == COUNT);
	all[0].msg_hdr.msg_iovlen = 1;
	CHECK(recvmmsg(server, all, 1, MSG_TRUNC, NULL) == 1);
	printf("  length %u, flags %x\n", all[0].msg_len,
	       all[0].msg_hdr.msg_flags);
	CHECK(recvmsg(server, &all[1].msg_hdr, MSG_PEEK | MSG_CMSG_CLOEXEC) ==
	      (ssize_t)length(16));
	printf("  flags %x\n", all[1].msg_hdr.msg_flags);
	all[1].msg_hdr.msg_name = NULL;
	all[1].msg_hdr.msg_namelen = 7;
	CHECK(recvmsg(server, &all[1].msg_hdr, 0) == (ssize_t)length(16));
	printf("  name of %u\n", all[1].msg_hdr.msg_namelen);
	CHECK(recvmsg(server, &all[2].msg_hdr, MSG_WAITALL) ==
	      (ssize_t)length(17));
	/* Less room for the address than it needs. */
	socklen_t len = 4;
	memset(&from[0], 0x55, sizeof(from[0]));
	CHECK(recvfrom(server, data[0], 2000, 0, &from[0].any, &len) ==
	      (ssize_t)length(18));
	CHECK(len == sizeof(from[0].v4) &&
	      from[0].v4.sin_addr.s_addr == 0x55555555);
	CHECK(receive_numbers(server, 19, QUEUED_DATAGRAMS) ==
	      QUEUED_DATAGRAMS - 19);
	CHECK(ioctl(server, FIONREAD, &size) == 0 && size == 0);
	CHECK(recv(server, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == -1 &&
	      errno == EAGAIN);
	send_by_client(0, "", 0);
	send_by_client(1, "x", 1);
	wait_for_arrival();
	CHECK(recv(server, data[0], 10, 0) == 0);
	CHECK(recv(server, data[0], 10, 0) == 1);
	close_server();
}

static void timeouts(int port)
{
	struct timeval soon = { .tv_usec = 60000 }, none = { 0 };
	struct timespec at[2];
	char data[8];
	long ms;

	begin_test("timeouts", port);
	CHECK(setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &soon,
			 sizeof(soon)) == 0);
	clock_gettime(CLOCK_MONOTONIC, &at[0]);
	CHECK(recv(server, data, sizeof(data), 0) == -1 && errno == EAGAIN);
	clock_gettime(CLOCK_MONOTONIC, &at[1]);
	ms = (at[1].tv_sec - at[0].tv_sec) * 1000 +
	     (at[1].tv_nsec - at[0].tv_nsec) / 1000000;
	CHECK(ms >= 50);
	send_by_client(0, "in time", 7);
	wait_for_arrival();
	CHECK(recv(server, data, sizeof(data), 0) == 7);
	CHECK(setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &none,
			 sizeof(none)) == 0);
	send_by_client(0, "later", 5);
	CHECK(recv(server, data, sizeof(data), 0) == 5);
	close_server();
}

/* The checksum of everything after the pseudo header of IPv4. */
static uint16_t checksum(const uint8_t *udp, size_t len, uint32_t from)
{
	uint32_t sum = IPPROTO_UDP + len, target = ntohl(to.v4.sin_addr.s_addr);
	size_t i;

	sum += (target >> 16) + (target & 0xffff);
	from = ntohl(from);
	sum += (from >> 16) + (from & 0xffff);
	for (i = 0; i < len; i++)
		sum += i & 1 ? udp[i] : udp[i] << 8;
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/*
 * A datagram "bad." whose checksum or length may be wrong, from a raw socket,
 * whose checksums are not completed.
 */
enum {
	RIGHT,
	WRONG,
	ZERO,
	SHORTER,
	LONGER
};

static void put_raw(int how)
{
	uint8_t udp[12] = { 0 };
	struct sockaddr_in target = to.v4, mine;
	socklen_t len = sizeof(mine);
	uint16_t word;

	target.sin_port = 0;
	if (syscall(SYS_connect, raw, &target, sizeof(target)) ||
	    syscall(SYS_getsockname, raw, &mine, &len))
		fail("raw");
	memcpy(udp, &ports[0], 2);
	memcpy(udp + 2, &to.v4.sin_port, 2);
	udp[5] = how == SHORTER ? 10 : how == LONGER ? 20 : 12;
	memcpy(udp + 8, "raw.", 4);
	word = checksum(udp, how == SHORTER ? 10 : 12, mine.sin_addr.s_addr);
	word = how == ZERO ? 0 : how == WRONG ? word ^ 0x0101 : word;
	udp[6] = word >> 8;
	udp[7] = word;
	if (syscall(SYS_sendto, raw, udp, 12, 0, NULL, 0) != 12)
		fail("raw");
}

static void checksums(int port)
{
	static const char *names[] = { "right", "wrong", "zero", "shorter",
				       "longer" };
	char data[2000];
	int how, got;

	begin_test("checksums", port);
	raw = open_hidden_socket(there, AF_INET, SOCK_RAW, IPPROTO_UDP);
	for (how = RIGHT; how <= LONGER; how++) {
		put_raw(how);
		send_by_client(1, "end", 3);
		wait_for_arrival();
		got = recv(server, data, sizeof(data), 0);
		printf("  %s: %d, %.3s\n", names[how], got, data);
		if (got != 3)
			CHECK(recv(server, data, sizeof(data), 0) == 3);
	}
	for (how = 0; how < QUEUED_DATAGRAMS; how++) {
		put_raw(WRONG);
		send_number(how);
	}
	wait_for_arrival();
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	put_raw(WRONG);
	wait_for_arrival();
	CHECK(is_empty(server));
	syscall(SYS_close, raw);
	close_server();
}

static void addresses(int port)
{
	const char *at[][2] = { { ip4, ip4 },
				{ "0.0.0.0", ip4 },
				{ ip6, ip6 },
				{ "::", ip6 },
				{ "::", ip4 } };
	size_t i;

	for (i = 0; i < sizeof(at) / sizeof(*at); i++) {
		union address from, back;
		socklen_t len = sizeof(from);
		char data[2000], text[64] = "";
		int right = 0, n;

		printf("address %zu\n", i);
		open_server(at[i][0], at[i][1], port + i);
		warm_up();
		send_all_numbers();
		CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) ==
		      QUEUED_DATAGRAMS);
		send_by_client(0, "who", 3);
		CHECK(recvfrom(server, data, sizeof(data), 0, &from.any,
			       &len) == 3);
		if (from.any.sa_family == AF_INET6)
			inet_ntop(AF_INET6, &from.v6.sin6_addr, text, 64);
		else
			inet_ntop(AF_INET, &from.v4.sin_addr, text, 64);
		printf("  from %s, %u bytes\n", text, len);
		/* Answers come from the address that was asked, in order. */
		for (n = 0; n < QUEUED_DATAGRAMS; n++) {
			socklen_t back_len = sizeof(back);

			if (sendto(server, &n, sizeof(n), 0, &from.any, len) !=
			    sizeof(n))
				fail("answer");
			if (syscall(SYS_recvfrom, clients[0], data, 2000, 0,
				    &back, &back_len) == sizeof(n))
				right += !memcmp(data, &n, sizeof(n)) &&
					 !memcmp(&back, &to, to_len);
		}
		CHECK(right == QUEUED_DATAGRAMS);
		close_server();
	}
}

void test_fallbacks(void)
{
	fallback_by_connect(7001);
	fallback_by_option(7002);
	fallback_by_control(7003);
	fallback_by_filter(7004);
	fallback_by_multicast(7005);
	fallback_while_peeking(7006);
	polls(7007);
}

/* Lengths of addresses that the kernel refuses or cuts, and too many messages. */
static void odd_sends(int port)
{
	static const int lens[] = { 16, -1, INT_MIN, 0, 8, 28, 128, 129, 1000 };
	static struct mmsghdr messages[MESSAGES];
	struct iovec piece = { "odd", 3 };
	union {
		struct sockaddr any;
		char room[1024];
	} peer = { 0 };
	socklen_t len = sizeof(peer);
	char data[2000];
	int count = 0;

	begin_test("odd sends", port);
	send_by_client(0, "peer", 4);
	CHECK(recvfrom(server, data, sizeof(data), 0, &peer.any, &len) == 4);
	/* Until the next hop is known. */
	for (int i = 0; i < 30; i++) {
		CHECK(sendto(server, "first", 5, 0, &peer.any, len) == 5);
		usleep(10000);
	}
	for (unsigned i = 0; i < sizeof(lens) / sizeof(*lens); i++) {
		struct msghdr message = { .msg_name = &peer,
					  .msg_namelen = lens[i],
					  .msg_iov = &piece,
					  .msg_iovlen = 1 };
		ssize_t sent = sendto(server, "odd", 3, 0, &peer.any,
				      (socklen_t)lens[i]);

		printf("  sendto, %d: %zd %s\n", lens[i], sent,
		       sent < 0 ? strerror(errno) : "");
		sent = sendmsg(server, &message, 0);
		printf("  sendmsg, %d: %zd %s\n", lens[i], sent,
		       sent < 0 ? strerror(errno) : "");
	}
	for (int i = 0; i < MESSAGES; i++)
		messages[i].msg_hdr = (struct msghdr){ .msg_name = &peer,
						       .msg_namelen = len,
						       .msg_iov = &piece,
						       .msg_iovlen = 1 };
	printf("  sendmmsg: %d\n", sendmmsg(server, messages, MESSAGES, 0));
	for (int i = 0; i < MESSAGES; i++)
		count += messages[i].msg_len == 3;
	printf("  lengths: %d\n", count);
	close_server();
}

void calls(void)
{
	messages(7011);
	timeouts(7012);
	checksums(7013);
	addresses(7014);
	odd_sends(7019);
}
