/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps that send. */
#include "differential.h"

#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define LENGTH_MAX 70000
#define MESSAGES_MAX 8

static _Thread_local char buffer[LENGTH_MAX];

/*
 * True if a datagram of that length may be sent to an address, or to the peer.
 */
static bool begin_send(struct step *step, int to, size_t *len)
{
	struct queue *queue =
		to ? queue_to(&shared->address[ARG(to)]) : queue_of_peer(FD);

	if (*len > LENGTH_MAX)
		*len = LENGTH_MAX;
	if (may_send(FD, queue, len)) {
		write_payload(FD, buffer, *len);
		return true;
	}
	print(" skipped");
	return false;
}

static void print_sent(long result)
{
	print_result(result);
	if (result >= 0)
		wait_for_delivery();
}

static void step_send(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (begin_send(step, 0, &len))
		print_sent(send(FD, buffer, len, (int)ARG(2)));
}

static void step_write(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (begin_send(step, 0, &len))
		print_sent(write(FD, buffer, len));
}

static void step_writev(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (!begin_send(step, 0, &len))
		return;
	struct iovec parts[2] = { { buffer, len / 2 },
				  { buffer + len / 2, len - len / 2 } };
	print_sent(writev(FD, parts, 2));
}

static void step_sendto(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];
	size_t len = (size_t)ARG(2);

	if (begin_send(step, 1, &len))
		print_sent(sendto(FD, buffer, len, (int)ARG(3), (void *)addr,
				  len_of(addr)));
}

static void step_sendmsg(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];
	size_t len = (size_t)ARG(2);

	if (!begin_send(step, 1, &len))
		return;
	struct iovec parts[2] = { { buffer, len / 2 },
				  { buffer + len / 2, len - len / 2 } };
	struct msghdr message = { .msg_name = addr,
				  .msg_namelen = len_of(addr),
				  .msg_iov = parts,
				  .msg_iovlen = 2 };
	print_sent(sendmsg(FD, &message, (int)ARG(3)));
}

/* sendmmsg SOCKET ADDRESS COUNT LENGTH FLAGS */
static void step_sendmmsg(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];
	struct mmsghdr many[MESSAGES_MAX] = { 0 };
	struct iovec parts[MESSAGES_MAX];
	int count = (int)ARG(2) % (MESSAGES_MAX + 1), done;

	for (int at = 0; at < count; at++) {
		size_t len = (size_t)ARG(3) % (LENGTH_MAX / MESSAGES_MAX);
		char *from = buffer + at * (LENGTH_MAX / MESSAGES_MAX);

		if (!may_send(FD, queue_to(addr), &len)) {
			print(" skipped");
			return;
		}
		write_payload(FD, from, len);
		parts[at] = (struct iovec){ from, len };
		many[at].msg_hdr.msg_iov = &parts[at];
		many[at].msg_hdr.msg_iovlen = 1;
		many[at].msg_hdr.msg_name = addr;
		many[at].msg_hdr.msg_namelen = len_of(addr);
	}
	done = sendmmsg(FD, many, (unsigned)count, (int)ARG(4));
	print_sent(done);
	for (int at = 0; at < done; at++)
		print(" %u", many[at].msg_len);
}

bool run_send(struct step *step)
{
	static const struct call calls[] = {
		STEP(send),   STEP(write),   STEP(writev),
		STEP(sendto), STEP(sendmsg), STEP(sendmmsg),
	};

	return run_call(calls, sizeof(calls) / sizeof(*calls), step);
}
