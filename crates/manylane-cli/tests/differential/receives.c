/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps that receive. */
#include "differential.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define BUFFER_SIZE 70000
#define MESSAGES_MAX 8

static _Thread_local char buffer[MESSAGES_MAX][BUFFER_SIZE];

static uint32_t sum_of(const char *bytes, size_t len)
{
	uint32_t sum = 2166136261u;

	for (size_t at = 0; at < len; at++)
		sum = (sum ^ (uint8_t)bytes[at]) * 16777619u;
	return sum;
}

/* The state of a receive step. */
struct receive {
	struct queue *queue;
	int actor, fd, flags;
	size_t room;
	bool is_ordered;
};

static struct receive begin(struct step *step, int room, int flags)
{
	struct receive one = { .actor = step->actor,
			       .fd = (int)step->arg[0].value,
			       .room = (size_t)step->arg[room].value,
			       .flags = flags ? (int)step->arg[flags].value :
						0 };

	one.queue = queue_of(one.fd);
	one.is_ordered = is_ordered(one.queue);
	if (one.room > BUFFER_SIZE - 8)
		one.room = BUFFER_SIZE - 8;
	/* Each datagram must be identifiable by its number. */
	if (!one.is_ordered)
		one.room = 2048;
	if (flags && would_block(one.fd))
		one.flags |= MSG_DONTWAIT;
	memset(buffer, 0xee, sizeof(buffer));
	/*
	 * It receives queued datagrams, at the latest after a slice in one
	 * lane: then no other step runs beside it.
	 */
	if (!one.queue || !one.queue->queued)
		shared->begun_ms[one.actor] = now_ms();
	errno = 0;
	return one;
}

static void no_answer(const struct receive *one)
{
	print_result(-1);
	if (errno == EAGAIN && !(one->flags & (MSG_ERRQUEUE | MSG_OOB)))
		print_received_set(one->queue);
}

/* False if the answer needs no further output. */
static bool answered(const struct receive *one, long got)
{
	if (got < 0) {
		no_answer(one);
		return false;
	}
	if (!(one->flags & MSG_PEEK)) {
		if (!one->is_ordered)
			received(one->queue, buffer[0], (size_t)got);
		count_receive(one->queue, one->actor, 1);
	}
	if (!one->is_ordered) {
		print(" = some");
		return false;
	}
	print_result(got);
	print(" sum %08x", sum_of(buffer[0], one->room + 8));
	return true;
}

static void step_recv(struct step *step)
{
	struct receive one = begin(step, 1, 2);

	answered(&one, recv(one.fd, buffer[0], one.room, one.flags));
}

static void step_recvfrom(struct step *step)
{
	struct receive one = begin(step, 1, 2);
	struct sockaddr_storage from = { 0 };
	socklen_t len = (socklen_t)step->arg[3].value;

	if (len > sizeof(from))
		len = sizeof(from);
	if (answered(&one, recvfrom(one.fd, buffer[0], one.room, one.flags,
				    (void *)&from, &len)))
		print_address(&from, len);
}

static void step_read(struct step *step)
{
	struct receive one = begin(step, 1, 0);

	if (would_block(one.fd)) {
		print(" skipped");
		return;
	}
	if (one.room)
		answered(&one, read(one.fd, buffer[0], one.room));
	else /* which receives no datagram */
		print_result(read(one.fd, buffer[0], 0));
}

static void step_readv(struct step *step)
{
	struct receive one = begin(step, 1, 0);
	size_t first = one.room / 3;
	struct iovec parts[3] = { { buffer[0], first },
				  { NULL, 0 },
				  { buffer[0] + first, one.room - first } };

	if (would_block(one.fd)) {
		print(" skipped");
		return;
	}
	if (one.room)
		answered(&one, readv(one.fd, parts, 3));
	else
		print_result(readv(one.fd, parts, 3));
}

static void say_control(struct msghdr *message)
{
	for (struct cmsghdr *at = CMSG_FIRSTHDR(message); at;
	     at = CMSG_NXTHDR(message, at)) {
		print(" control %d/%d/%zu", at->cmsg_level, at->cmsg_type,
		      at->cmsg_len);
		if (at->cmsg_level == SOL_IP && at->cmsg_type == IP_PKTINFO) {
			struct in_pktinfo *info = (void *)CMSG_DATA(at);

			print(" %x %x %d", ntohl(info->ipi_addr.s_addr),
			      ntohl(info->ipi_spec_dst.s_addr),
			      info->ipi_ifindex);
		}
	}
}

static void step_recvmsg(struct step *step)
{
	struct receive one = begin(step, 1, 2);
	struct sockaddr_storage from = { 0 };
	char control[256];
	size_t first = one.room / 2;
	struct iovec parts[2] = { { buffer[0], first },
				  { buffer[0] + first, one.room - first } };
	struct msghdr message = { .msg_iov = parts,
				  .msg_iovlen = 2,
				  .msg_name = &from,
				  .msg_namelen = sizeof(from),
				  .msg_control = control };

	message.msg_controllen = (size_t)step->arg[3].value % sizeof(control);
	if (!answered(&one, recvmsg(one.fd, &message, one.flags)))
		return;
	print(" flags %x", message.msg_flags);
	print_address(&from, message.msg_namelen);
	say_control(&message);
}

/*
 * Receives all that are queued: one call may return fewer than another lane
 * has.
 */
static void step_recvmmsg(struct step *step)
{
	struct receive one = begin(step, 2, 3);
	int wanted = (int)step->arg[1].value % (MESSAGES_MAX + 1), done = 0,
	    got = 0;
	struct sockaddr_storage from[MESSAGES_MAX] = { 0 };
	struct mmsghdr many[MESSAGES_MAX] = { 0 };
	struct iovec parts[MESSAGES_MAX];

	for (int at = 0; at < wanted; at++) {
		parts[at] = (struct iovec){ buffer[at], one.room };
		many[at].msg_hdr.msg_iov = &parts[at];
		many[at].msg_hdr.msg_iovlen = 1;
		many[at].msg_hdr.msg_name = &from[at];
		many[at].msg_hdr.msg_namelen = sizeof(from[at]);
	}
	do {
		got = recvmmsg(one.fd, many + done, (unsigned)(wanted - done),
			       one.flags | (done ? MSG_DONTWAIT : 0), NULL);
		done += got > 0 ? got : 0;
	} while (got > 0 && done < wanted && !(one.flags & MSG_PEEK));
	if (!done && got < 0) {
		no_answer(&one);
		return;
	}
	print(" = %d", done);
	if (!(one.flags & MSG_PEEK) && done > 0)
		count_receive(one.queue, one.actor, (uint32_t)done);
	for (int at = 0; at < done; at++) {
		if (!one.is_ordered) {
			if (!(one.flags & MSG_PEEK))
				received(one.queue, buffer[at],
					 many[at].msg_len);
			continue;
		}
		print(" (%u sum %08x flags %x", many[at].msg_len,
		      sum_of(buffer[at], one.room + 8),
		      many[at].msg_hdr.msg_flags);
		print_address(&from[at], many[at].msg_hdr.msg_namelen);
		print(")");
	}
	if (got < 0 && errno == EAGAIN)
		print_received_set(one.queue);
}

/* Receives all that is queued. */
static void step_drain(struct step *step)
{
	struct receive one = begin(step, 1, 0);
	long got = 0;

	for (int on_actor_exit = PAYLOADS; on_actor_exit; on_actor_exit--) {
		got = recv(one.fd, buffer[0], 2048, MSG_DONTWAIT);
		if (got < 0)
			break;
		count_receive(one.queue, one.actor, 1);
		if (!one.is_ordered)
			received(one.queue, buffer[0], (size_t)got);
		else
			print(" (%ld sum %08x)", got, sum_of(buffer[0], 2048));
	}
	no_answer(&one);
}

bool run_receive(struct step *step)
{
	static const struct call calls[] = {
		STEP(recv),    STEP(recvfrom), STEP(read),  STEP(readv),
		STEP(recvmsg), STEP(recvmmsg), STEP(drain),
	};

	return run_call(calls, sizeof(calls) / sizeof(*calls), step);
}
