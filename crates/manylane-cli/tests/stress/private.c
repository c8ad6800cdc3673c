/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A socket of one thread: everything that happens to it is known, and so the
 * result of each call. The model is a queue.
 */
#include "stress.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define QUEUE_MAX 16

struct model {
	int fd, peer; /* the socket, and the one that sends to it */
	struct sockaddr_in addr, from;
	uint32_t next;		 /* number of the next datagram to send */
	uint32_t first;		 /* of the next one to receive */
	uint16_t len[QUEUE_MAX]; /* by number */
	bool has_info;		 /* IP_PKTINFO */
};

static void fill(char *buffer, uint32_t number, uint32_t len)
{
	for (uint32_t at = 0; at < len; at++)
		buffer[at] = (char)(number * 31 + at);
}

static void open_both(struct model *model)
{
	socklen_t len = sizeof(model->addr);
	struct sockaddr_in any = { .sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	model->fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
	model->peer = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	CHECK(model->fd >= 0 && model->peer >= 0, "socket: %m");
	CHECK(!bind(model->fd, (void *)&any, sizeof(any)), "bind: %m");
	CHECK(!bind(model->peer, (void *)&any, sizeof(any)), "bind: %m");
	CHECK(!getsockname(model->fd, (void *)&model->addr, &len),
	      "getsockname: %m");
	CHECK(!getsockname(model->peer, (void *)&model->from, &len),
	      "getsockname: %m");
}

static void send_one(struct actor *actor, struct model *model)
{
	char buffer[1500];
	uint32_t len = draw(actor, sizeof(buffer));

	if (model->next - model->first == QUEUE_MAX)
		return;
	fill(buffer, model->next, len);
	CHECK(sendto(model->peer, buffer, len, 0, (void *)&model->addr,
		     sizeof(model->addr)) == (ssize_t)len,
	      "sendto: %m");
	model->len[model->next++ % QUEUE_MAX] = (uint16_t)len;
}

/*
 * A datagram was sent, and a call reports an empty queue. That is correct if
 * the kernel has not delivered it yet (its softirq was out of time, or the
 * machine stalled), or had not a moment ago. Then the call is made again when a
 * socket of the port has a datagram. If the queue is empty again, it is an
 * error.
 */
static bool is_delayed(const struct model *model, int *tries)
{
	if ((*tries)++)
		return false;
	shared->late++;
	for (int turn = 0; turn < 60000 && !queued_bytes(model->addr.sin_port);
	     turn++)
		usleep(1000);
	return true;
}

/* Makes one call that receives or peeks, and compares it with the model. */
static void receive_one(struct actor *actor, struct model *model)
{
	char buffer[2000], expected[2000], control[256];
	struct sockaddr_in from = { 0 };
	uint32_t room = draw(actor, 3) ? sizeof(buffer) : draw(actor, 1500);
	struct iovec part = { buffer, room };
	struct msghdr msg = { .msg_name = &from,
			      .msg_namelen = sizeof(from),
			      .msg_iov = &part,
			      .msg_iovlen = 1,
			      .msg_control = control,
			      .msg_controllen = sizeof(control) };
	bool is_empty = model->next == model->first;
	uint32_t len = is_empty ? 0 : model->len[model->first % QUEUE_MAX];
	uint32_t copied = len < room ? len : room;
	int flags = (draw(actor, 2) ? MSG_PEEK : 0) |
		    (draw(actor, 2) ? MSG_TRUNC : 0) | MSG_DONTWAIT;
	ssize_t got;

	bool with_message = draw(actor, 2);
	int tries = 0;
again:
	if (with_message) {
		got = recvmsg(model->fd, &msg, flags);
		CHECK(got < 0 || !!(msg.msg_flags & MSG_TRUNC) == (len > room),
		      "flags of a message: %x", msg.msg_flags);
		CHECK(got < 0 || !!CMSG_FIRSTHDR(&msg) == model->has_info,
		      "control messages: %zu", msg.msg_controllen);
	} else {
		socklen_t size = sizeof(from);

		got = recvfrom(model->fd, buffer, room, flags, (void *)&from,
			       &size);
	}
	if (is_empty) {
		CHECK(got < 0 && errno == EAGAIN,
		      "nothing is there, and a receive says %zd: %m", got);
		return;
	}
	if (got < 0 && errno == EAGAIN && is_delayed(model, &tries))
		goto again;
	if (got < 0) {
		int saved = errno;

		report_all();
		errno = saved;
	}
	CHECK(got == (ssize_t)(flags & MSG_TRUNC ? len : copied),
	      "%u bytes are there, and a receive says %zd: %m", len, got);
	fill(expected, model->first, copied);
	CHECK(!memcmp(buffer, expected, copied), "not the next one");
	CHECK(from.sin_port == model->from.sin_port, "from somebody else");
	if (!(flags & MSG_PEEK))
		model->first++;
}

static void query(struct actor *actor, struct model *model)
{
	bool is_empty = model->next == model->first;
	struct pollfd one = { .fd = model->fd, .events = POLLIN | POLLOUT };
	struct epoll_event event = { .events = EPOLLIN, .data.u32 = 7 };
	int value = -1, epoll;
	socklen_t len = sizeof(value);

	uint32_t what = draw(actor, 6);
	int tries = 0;
	bool seen;

	switch (what) {
	case 0:
	again:
		CHECK(poll(&one, 1, 0) == 1 && one.revents & POLLOUT,
		      "poll says %x", one.revents);
		seen = one.revents == (POLLIN | POLLOUT);
		if (!seen && !is_empty && is_delayed(model, &tries))
			goto again;
		CHECK(seen == !is_empty, "poll says %x", one.revents);
		break;
	case 1:
		epoll = epoll_create1(0);
		CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, model->fd, &event),
		      "EPOLL_CTL_ADD: %m");
	again_epoll:
		seen = epoll_wait(epoll, &event, 1, 0) == 1;
		if (!seen && !is_empty && is_delayed(model, &tries))
			goto again_epoll;
		CHECK(seen == !is_empty && event.data.u32 == 7, "epoll_wait");
		close(epoll);
		break;
	case 2:
	again_size:
		CHECK(!ioctl(model->fd, FIONREAD, &value), "FIONREAD: %m");
		if (!value && !is_empty && is_delayed(model, &tries))
			goto again_size;
		CHECK(value == (is_empty ?
					0 :
					model->len[model->first % QUEUE_MAX]),
		      "FIONREAD says %d", value);
		break;
	case 3:
		value = model->has_info = !model->has_info;
		/*
		 * Queued datagrams get the control message according to the
		 * option at the receive.
		 */
		CHECK(!setsockopt(model->fd, SOL_IP, IP_PKTINFO, &value,
				  sizeof(value)),
		      "IP_PKTINFO: %m");
		CHECK(!getsockopt(model->fd, SOL_IP, IP_PKTINFO, &value,
				  &len) &&
			      value == model->has_info,
		      "IP_PKTINFO is %d", value);
		break;
	case 4:
		value = fcntl(model->fd, F_GETFL);
		CHECK(value & O_NONBLOCK, "flags: %x", value);
		CHECK(!fcntl(model->fd, F_SETFL, value & ~O_NONBLOCK) &&
			      !fcntl(model->fd, F_SETFL, value),
		      "F_SETFL: %m");
		break;
	default:
		value = 1 << 18;
		CHECK(!setsockopt(model->fd, SOL_SOCKET, SO_RCVBUF, &value,
				  sizeof(value)),
		      "SO_RCVBUF: %m");
	}
}

static void answer(struct model *model)
{
	char buffer[16] = "";
	struct sockaddr_in from = { 0 };
	socklen_t len = sizeof(from);

	CHECK(sendto(model->fd, "pong", 4, 0, (void *)&model->from,
		     sizeof(model->from)) == 4,
	      "sendto: %m");
	CHECK(recvfrom(model->peer, buffer, sizeof(buffer), 0, (void *)&from,
		       &len) == 4 &&
		      !memcmp(buffer, "pong", 4),
	      "no answer: %m");
	CHECK(from.sin_port == model->addr.sin_port,
	      "an answer from another port");
}

/* Moves the descriptor to another number. */
static void move_fd(struct actor *actor, struct model *model)
{
	int other = draw(actor, 2) ? dup(model->fd) :
				     fcntl(model->fd, F_DUPFD, 1100);

	CHECK(other >= 0 && !close(model->fd), "dup: %m");
	model->fd = other;
}

/*
 * Connects: queued datagrams stay, and only those of the peer arrive, as
 * before.
 */
static void connect_peer(struct model *model)
{
	char byte;

	CHECK(!connect(model->fd, (void *)&model->from, sizeof(model->from)),
	      "connect: %m");
	CHECK(send(model->fd, "x", 1, 0) == 1 &&
		      recv(model->peer, &byte, 1, 0) == 1 && byte == 'x',
	      "send: %m");
}

void use_private(struct actor *actor)
{
	struct model model = { 0 };

	open_both(&model);
	for (uint32_t left = 20 + draw(actor, 200); left > 0; left--) {
		shared->calls++;
		switch (draw(actor, 12)) {
		case 0:
		case 1:
		case 2:
		case 3:
			send_one(actor, &model);
			break;
		case 4:
		case 5:
		case 6:
		case 7:
			receive_one(actor, &model);
			break;
		case 8:
			answer(&model);
			break;
		case 9:
			move_fd(actor, &model);
			break;
		case 10:
			if (!draw(actor, 10))
				connect_peer(&model);
			break;
		default:
			query(actor, &model);
		}
	}
	CHECK(!close(model.fd) && !close(model.peer), "close: %m");
	/* The port must be free again. */
	int again = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK(!bind(again, (void *)&model.addr, sizeof(model.addr)) ||
		      errno == EADDRINUSE,
	      "bind again: %m");
	close(again);
}
