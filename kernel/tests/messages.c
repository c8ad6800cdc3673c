// SPDX-License-Identifier: GPL-2.0-only
/*
 * What a receive returns about a datagram: the same as from a socket that is not
 * attached, byte by byte. Each datagram is sent to two sockets, to one of each.
 */
#define _GNU_SOURCE
#include <netinet/udp.h>

#include "test.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

struct message {
	struct sockaddr_storage name;
	char data[4096], control[512];
	struct iovec iov;
	struct msghdr msg;
	ssize_t len;
	int error;
};

static void receive(struct message *m, int fd, size_t room, int flags)
{
	memset(m, 0, sizeof(*m));
	m->iov = (struct iovec){ m->data, room };
	m->msg = (struct msghdr){ .msg_name = &m->name,
				  .msg_namelen = sizeof(m->name),
				  .msg_iov = &m->iov,
				  .msg_iovlen = 1,
				  .msg_control = m->control,
				  .msg_controllen = sizeof(m->control) };
	m->len = recvmsg(fd, &m->msg, flags);
	m->error = m->len < 0 ? errno : 0;
}

/* The time of arrival, and the port of the socket, differ between the two. */
static int varies(const struct cmsghdr *c)
{
	if (c->cmsg_level == SOL_IP)
		return c->cmsg_type == IP_ORIGDSTADDR;
	return c->cmsg_level == SOL_SOCKET;
}

static int compare(struct message *plain, struct message *ours)
{
	struct cmsghdr *a, *b;
	int n = 0;

	is(ours->error, plain->error);
	if (plain->error)
		return 0;
	is(ours->len, plain->len);
	is(ours->msg.msg_namelen, plain->msg.msg_namelen);
	is(ours->msg.msg_flags, plain->msg.msg_flags);
	is(ours->msg.msg_controllen, plain->msg.msg_controllen);
	is(memcmp(ours->data, plain->data, sizeof(plain->data)), 0);
	is(memcmp(&ours->name, &plain->name, sizeof(plain->name)), 0);
	a = CMSG_FIRSTHDR(&plain->msg);
	b = CMSG_FIRSTHDR(&ours->msg);
	for (; a && b; a = CMSG_NXTHDR(&plain->msg, a),
		       b = CMSG_NXTHDR(&ours->msg, b), n++) {
		is(b->cmsg_level, a->cmsg_level);
		is(b->cmsg_type, a->cmsg_type);
		is(b->cmsg_len, a->cmsg_len);
		if (!varies(a) && memcmp(CMSG_DATA(a), CMSG_DATA(b),
					 a->cmsg_len - sizeof(*a)))
			fail("control message %d/%d differs", a->cmsg_level,
			     a->cmsg_type);
	}
	is(!a, !b);
	return n;
}

static void set(int fd, int level, int name)
{
	int on = 1;

	is(setsockopt(fd, level, name, &on, sizeof(on)), 0);
}

/* Sends to both sockets from one socket; what they receive has to be the same. */
static int check_pair(int plain, int ours, int family, size_t len, size_t room,
		      int flags)
{
	static struct message a, b;
	struct sockaddr_storage name;
	socklen_t name_len = sizeof(name);
	int from = socket(family, SOCK_DGRAM, 0), i, fd, n;
	char data[4096];

	for (i = 0; i < 4096; i++)
		data[i] = i;
	for (i = 0; i < 2; i++) {
		fd = i ? ours : plain;
		is(getsockname(fd, (struct sockaddr *)&name, &name_len), 0);
		if (family == AF_INET && name.ss_family == AF_INET6) {
			struct sockaddr_in four = {
				.sin_family = AF_INET,
				.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
				.sin_port = ((struct sockaddr_in6 *)&name)
						    ->sin6_port
			};

			is(sendto(from, data, len, 0, (struct sockaddr *)&four,
				  sizeof(four)),
			   len);
		} else {
			is(sendto(from, data, len, 0, (struct sockaddr *)&name,
				  name_len),
			   len);
		}
		name_len = sizeof(name);
	}
	receive(&a, plain, room, flags);
	receive(&b, ours, room, flags);
	n = compare(&a, &b);
	close(from);
	return n;
}

static void control_messages(void)
{
	static const int timestamps[] = { SO_TIMESTAMP, SO_TIMESTAMPNS };
	struct {
		int family, sender, level, name;
	} options[] = {
		{ AF_INET, AF_INET, SOL_IP, IP_PKTINFO },
		{ AF_INET, AF_INET, SOL_IP, IP_RECVTTL },
		{ AF_INET, AF_INET, SOL_IP, IP_RECVTOS },
		{ AF_INET, AF_INET, SOL_IP, IP_RECVORIGDSTADDR },
		{ AF_INET6, AF_INET6, SOL_IPV6, IPV6_RECVPKTINFO },
		{ AF_INET6, AF_INET6, SOL_IPV6, IPV6_RECVTCLASS },
		{ AF_INET6, AF_INET6, SOL_IPV6, IPV6_RECVHOPLIMIT },
		{ AF_INET6, AF_INET, SOL_IPV6, IPV6_RECVPKTINFO },
		{ AF_INET6, AF_INET, SOL_IP, IP_RECVTTL },
	};
	unsigned int i, t, all = 0;

	for (i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
		int fd[2], k, n;

		for (k = 0; k < 2; k++) {
			struct sockaddr_in6 any = { .sin6_family =
							    options[i].family };

			fd[k] = socket(options[i].family, SOCK_DGRAM, 0);
			is(bind(fd[k], (struct sockaddr *)&any, sizeof(any)),
			   0);
			if (k)
				is(attach(fd[k], 0, 2), 2);
		}
		/* No options, a short buffer, none; then one option after the other. */
		is(check_pair(fd[0], fd[1], options[i].sender, 100, 4096, 0),
		   0);
		is(check_pair(fd[0], fd[1], options[i].sender, 100, 10, 0), 0);
		is(check_pair(fd[0], fd[1], options[i].sender, 100, 10,
			      MSG_TRUNC),
		   0);
		is(check_pair(fd[0], fd[1], options[i].sender, 0, 4096, 0), 0);
		is(check_pair(fd[0], fd[1], options[i].sender, 4000, 4096, 0),
		   0);
		for (k = 0; k < 2; k++)
			set(fd[k], options[i].level, options[i].name);
		n = check_pair(fd[0], fd[1], options[i].sender, 100, 4096, 0);
		is(n, 1);
		all += n;
		for (t = 0; t < 2; t++) {
			for (k = 0; k < 2; k++)
				set(fd[k], SOL_SOCKET, timestamps[t]);
			is(check_pair(fd[0], fd[1], options[i].sender, 100,
				      4096, 0),
			   2);
		}
		for (k = 0; k < 2; k++) {
			is(counts_of(fd[1]).all.left, 0);
			close(fd[k]);
		}
	}
	is(all, i);
}

/*
 * Ten datagrams of one call. UDP cuts what comes joined into datagrams again, also
 * for sockets with UDP_GRO, because it takes ours for those of tunnels.
 */
static void segments(void)
{
	int gro, i;

	for (gro = 0; gro < 2; gro++) {
		int fd = attached(AF_INET, 0, 2), from = sender_to(fd),
		    size = 100;
		static struct message m;
		char data[1000] = "";

		if (gro)
			set(fd, SOL_UDP, UDP_GRO);
		is(setsockopt(from, SOL_UDP, UDP_SEGMENT, &size, sizeof(size)),
		   0);
		is(send(from, data, 1000, 0), 1000);
		await_arrived(fd, 10);
		for (i = 0; i < 10; i++) {
			receive(&m, fd, 4096, MSG_DONTWAIT);
			is(m.len, 100);
			is(m.msg.msg_controllen, 0);
		}
		receive(&m, fd, 4096, MSG_DONTWAIT);
		is(m.error, EAGAIN);
		close(fd);
	}
}

/* ICMP errors: a socket with the hook of a tunnel would not be told of them. */
static void errors(void)
{
	static const int families[] = { AF_INET, AF_INET6 };
	static struct message m[2];
	int f, with_queue, k;

	for (f = 0; f < 2; f++) {
		for (with_queue = 0; with_queue < 2; with_queue++) {
			struct sockaddr_storage nobody;
			socklen_t len = families[f] == AF_INET ?
						sizeof(struct sockaddr_in) :
						sizeof(struct sockaddr_in6);
			int fd[2], error[2];

			close(bound(families[f], &nobody));
			for (k = 0; k < 2; k++) {
				fd[k] = k ? attached(families[f], 0, 2) :
					    bound(families[f], NULL);
				is(connect(fd[k], (struct sockaddr *)&nobody,
					   len),
				   0);
				if (with_queue && families[f] == AF_INET)
					set(fd[k], SOL_IP, IP_RECVERR);
				else if (with_queue)
					set(fd[k], SOL_IPV6, IPV6_RECVERR);
				is(send(fd[k], "x", 1, 0), 1);
				error[k] =
					recv(fd[k], &len, 1, 0) < 0 ? errno : 0;
				receive(&m[k], fd[k], 4096,
					MSG_ERRQUEUE | MSG_DONTWAIT);
			}
			is(error[0], ECONNREFUSED);
			is(error[1], ECONNREFUSED);
			is(compare(&m[0], &m[1]), with_queue);
			close(fd[0]);
			close(fd[1]);
		}
	}
}

/* An error of a connected socket wakes a receive that blocks. */
static int error_fd;
static void *block(void *result)
{
	char data[4];

	*(int *)result = recv(error_fd, data, 4, 0) < 0 ? errno : 0;
	return NULL;
}
static void error_wakes(void)
{
	struct sockaddr_storage nobody;
	pthread_t thread;
	int result = 0;

	close(bound(AF_INET, &nobody));
	error_fd = attached(AF_INET, 0, 2);
	is(connect(error_fd, (struct sockaddr *)&nobody,
		   sizeof(struct sockaddr_in)),
	   0);
	pthread_create(&thread, NULL, block, &result);
	usleep(200000);
	is(send(error_fd, "x", 1, 0), 1);
	pthread_join(thread, NULL);
	is(result, ECONNREFUSED);
}

static void connected(void)
{
	int fd = attached(AF_INET, MANYLANE_FLOW, 4),
	    from = bound(AF_INET, NULL), other = sender_to(fd);
	struct sockaddr_storage name, back;
	socklen_t len = sizeof(name);

	is(getsockname(from, (struct sockaddr *)&name, &len), 0);
	is(connect(fd, (struct sockaddr *)&name, len), 0);
	len = sizeof(back);
	is(getsockname(fd, (struct sockaddr *)&back, &len), 0);
	is(connect(from, (struct sockaddr *)&back, len), 0);
	send_numbers(from, 0, 100);
	await_arrived(fd, 100);
	/* Of another sender: not for this socket any more. */
	send(other, "x", 1, 0);
	usleep(20000);
	is(counts_of(fd).sum.arrived, 100);
	is(drain(fd, NULL, 0), 100);
}

static void many_at_once(void)
{
	int fd = attached(AF_INET, 0, 4), from = sender_to(fd), i, n = 0;
	struct mmsghdr m[64] = {};
	struct iovec iov[64];
	uint32_t data[64];
	unsigned char seen[200] = {};

	for (i = 0; i < 64; i++) {
		iov[i] = (struct iovec){ &data[i], 4 };
		m[i].msg_hdr.msg_iov = &iov[i];
		m[i].msg_hdr.msg_iovlen = 1;
	}
	send_numbers(from, 0, 200);
	await_arrived(fd, 200);
	while (n < 200) {
		int got = recvmmsg(fd, m, 64, MSG_WAITFORONE, NULL);

		is(got, n < 192 ? 64 : 8);
		for (i = 0; i < got; i++) {
			is(m[i].msg_len, 4);
			seen[data[i]]++;
		}
		n += got;
	}
	for (i = 0; i < 200; i++)
		is(seen[i], 1);
}

const struct test message_tests[] = {
	{ "names, lengths, flags and control messages", control_messages },
	{ "UDP_SEGMENT and UDP_GRO", segments },
	{ "ICMP errors", errors },
	{ "an error wakes a receive", error_wakes },
	{ "connected", connected },
	{ "recvmmsg", many_at_once },
	{},
};
