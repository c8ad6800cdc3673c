/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a program gets that comes late:
 *
 *	overload CASE
 *
 * CASE is a call ("recv", "recvfrom", "read", "readv", "recvmsg", "recvmmsg"):
 * one thread takes all with it after a flood. "few": less than half a queue
 * came; "some": a bit more; "peek", "size": after the flood it looks at what comes next, and takes
 * it; "lengths": it has little room for the address, and gets control messages.
 * Prints how many were sent, dropped by the kernel, and received, the numbers
 * of the first and of the last one received, and of the last one that was
 * queued, what was out of order, and how many are a quarter of a queue.
 */
#define _GNU_SOURCE
#include "loopback.h"
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define FLOWS 16

struct datagram {
	int number;
	char rest[60];
};

static int server, clients[FLOWS], next;
static struct sockaddr_in address;
static unsigned limit, least, disorder;

static unsigned memory(int which)
{
	unsigned words[9];
	socklen_t len = sizeof(words);

	if (getsockopt(server, SOL_SOCKET, SO_MEMINFO, words, &len)) {
		perror("SO_MEMINFO");
		exit(1);
	}
	return words[which];
}

static void send_one(int number)
{
	struct datagram datagram = { .number = number };

	if (sendto(clients[next++ % FLOWS], &datagram, sizeof(datagram), 0,
		   (void *)&address, sizeof(address)) != sizeof(datagram))
		perror("sendto");
}

/* Takes one: its number, -1 if there is none. */
static int take(const char *call)
{
	struct datagram datagram[4] = { { .number = -2 } };
	struct iovec parts[2] = { { datagram, 3 },
				  { (char *)datagram + 3, 61 } };
	struct sockaddr_in from[4];
	socklen_t len = sizeof(from[0]);
	struct msghdr message = { .msg_name = from,
				  .msg_namelen = sizeof(from[0]),
				  .msg_iov = parts,
				  .msg_iovlen = 2 };
	ssize_t got;

	from[0].sin_family = AF_UNSPEC;
	if (!strcmp(call, "recv")) {
		got = recv(server, datagram, sizeof(*datagram), MSG_TRUNC);
		from[0].sin_family = AF_INET;
	} else if (!strcmp(call, "read")) {
		got = read(server, datagram, sizeof(*datagram));
		from[0].sin_family = AF_INET;
	} else if (!strcmp(call, "readv")) {
		got = readv(server, parts, 2);
		from[0].sin_family = AF_INET;
	} else if (!strcmp(call, "recvmsg")) {
		got = recvmsg(server, &message, 0);
		if (got >= 0)
			len = message.msg_namelen;
	} else if (!strcmp(call, "recvmmsg")) {
		struct mmsghdr one = { .msg_hdr = message };

		got = recvmmsg(server, &one, 1, 0, NULL);
		if (got == 1) {
			got = one.msg_len;
			len = one.msg_hdr.msg_namelen;
		}
	} else {
		got = recvfrom(server, datagram, sizeof(*datagram),
			       MSG_DONTWAIT, (void *)from, &len);
	}
	if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return -1;
	if (got != sizeof(*datagram) || len != sizeof(from[0]) ||
	    from[0].sin_family != AF_INET) {
		fprintf(stderr, "%s: %zd, %u: %m\n", call, got, len);
		exit(1);
	}
	return datagram->number;
}

/* Takes all, and says what there was. */
static void take_all(const char *call, int sent)
{
	unsigned dropped = memory(8), received = 0;
	int first = -1, last = -1, number;

	while ((number = take(call)) >= 0) {
		if (first < 0)
			first = number;
		else if (number != last + 1)
			disorder++;
		last = number;
		received++;
	}
	printf("sent %d dropped %u received %u first %d last %d queued %u disorder %u quarter %u\n",
	       sent, dropped, received, first, last, sent - dropped - 1,
	       disorder, limit / 4 / least);
}

/* With control messages, and room for two bytes of the address. */
static void lengths(int sent)
{
	char bytes[64], control[64], name[32];
	struct iovec part = { bytes, sizeof(bytes) };
	struct msghdr message = { .msg_name = name,
				  .msg_namelen = 2,
				  .msg_iov = &part,
				  .msg_iovlen = 1,
				  .msg_control = control,
				  .msg_controllen = sizeof(control) };
	struct cmsghdr *cmsg;
	socklen_t len = 2;
	ssize_t got;

	memset(name, 'n', sizeof(name));
	got = recvmsg(server, &message, 0);
	cmsg = CMSG_FIRSTHDR(&message);
	printf("got %zd, name %u, kept %d, control %d, flags %x\n", got,
	       message.msg_namelen, name[2] == 'n' && name[15] == 'n',
	       cmsg && cmsg->cmsg_level == SOL_IP &&
		       cmsg->cmsg_type == IP_PKTINFO,
	       message.msg_flags);
	/* The queue is full again when the next look is due. */
	while (next < 2 * sent)
		send_one(next);
	settle();
	for (int i = 0; i < 8; i++) {
		memset(name, 'n', sizeof(name));
		len = 2;
		got = recvfrom(server, bytes, sizeof(bytes), 0, (void *)name,
			       &len);
		if (got != sizeof(bytes) || len != 16 || name[2] != 'n')
			disorder++;
	}
	printf("disorder %u\n", disorder);
}

int main(int argc, char **argv)
{
	const char *which = argc > 1 ? argv[1] : "";
	int sent = 1000, on = 1, size = -1;
	struct datagram datagram = { .number = -2 };

	for (int i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	stay_here();
	/* What a datagram costs, seen on a socket of its own. */
	server = loopback_server(SOCK_NONBLOCK, &address);
	limit = memory(1);
	send_one(0);
	settle();
	least = memory(0);
	close(server);
	server = loopback_server(SOCK_NONBLOCK, &address);
	next = 0;
	if (!strcmp(which, "lengths"))
		setsockopt(server, SOL_IP, IP_PKTINFO, &on, sizeof(on));
	if (!strcmp(which, "few"))
		sent = limit / 2 / least;
	if (!strcmp(which, "some"))
		sent = limit / 2 / least + 1;
	while (next < sent)
		send_one(next);
	settle();
	if (!strcmp(which, "lengths")) {
		lengths(sent);
		return 0;
	}
	if (!strcmp(which, "peek"))
		recv(server, &datagram, sizeof(datagram), MSG_PEEK);
	if (!strcmp(which, "size") && !ioctl(server, FIONREAD, &size))
		printf("size %d\n", size);
	if (!strcmp(which, "peek") || !strcmp(which, "size"))
		printf("seen %d taken %d\n", datagram.number, take("recvfrom"));
	take_all(which, sent);
	return 0;
}
