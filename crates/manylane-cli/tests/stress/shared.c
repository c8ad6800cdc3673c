/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Sockets that all threads and children receive on, each in its own way. The
 * rule: a datagram is received once, by a socket that it was sent to, and soon,
 * by any receiver.
 */
#include "stress.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LENGTH_MAX 1200

static uint32_t check_of(const struct datagram *head)
{
	return head->id * 2654435761u ^ head->socket ^ (head->len << 16) ^
	       (uint32_t)head->seed;
}

void open_shared(void)
{
	for (uint32_t at = 0; at < SOCKETS; at++) {
		struct shared_socket *one = &shared->socket[at];
		struct timeval timeout = { .tv_usec = TIMEOUT_MS * 1000 };
		socklen_t len = sizeof(one->addr);

		one->way = at % WAYS;
		one->addr.sin_family = AF_INET;
		one->addr.sin_addr.s_addr =
			htonl(at < WAYS ? INADDR_LOOPBACK : INADDR_ANY);
		one->fd = socket(AF_INET,
				 SOCK_DGRAM | (at & 1 ? SOCK_CLOEXEC : 0), 0);
		CHECK(one->fd >= 0, "socket: %m");
		CHECK(!setsockopt(one->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout,
				  sizeof(timeout)),
		      "SO_RCVTIMEO: %m");
		CHECK(!bind(one->fd, (void *)&one->addr, len), "bind: %m");
		CHECK(!getsockname(one->fd, (void *)&one->addr, &len),
		      "getsockname: %m");
		one->addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		if (one->way != WAY_BLOCK && one->way != WAY_MIXED)
			fcntl(one->fd, F_SETFL,
			      fcntl(one->fd, F_GETFL) | O_NONBLOCK);
	}
}

void send_shared(struct actor *actor, const int *flows)
{
	static _Thread_local char buffer[LENGTH_MAX];
	struct datagram *head = (void *)buffer;
	uint32_t at = draw(actor, SOCKETS);
	struct shared_socket *to = &shared->socket[at];

	/*
	 * Two senders may both see the last free place: one more does no harm.
	 */
	if (to->sent - to->received >= WINDOW) {
		usleep(200);
		return;
	}
	head->id = atomic_fetch_add(&shared->ids, 1);
	if (head->id >= DATAGRAMS_MAX) {
		shared->quiet = true;
		return;
	}
	head->seed = shared->seed;
	head->socket = at;
	head->len = sizeof(*head) + draw(actor, LENGTH_MAX - sizeof(*head));
	head->check = check_of(head);
	/* Counted before it can be received. */
	to->sent++;
	ssize_t sent = sendto(flows[draw(actor, FLOWS)], buffer, head->len, 0,
			      (void *)&to->addr, sizeof(to->addr));

	CHECK(sent == head->len, "sendto: %zd of %u: %m", sent, head->len);
}

/* Receives replies: each arrives once, at the flow that asked. */
void receive_answers(const int *flows)
{
	for (int flow = 0; flow < FLOWS; flow++) {
		struct datagram head;
		ssize_t got;

		while ((got = recv(flows[flow], &head, sizeof(head),
				   MSG_DONTWAIT)) >= 0) {
			CHECK(got == sizeof(head) &&
				      head.seed == shared->seed &&
				      head.check == ~check_of(&head) &&
				      head.id < DATAGRAMS_MAX &&
				      head.socket < SOCKETS,
			      "not an answer: %zd bytes", got);
			CHECK(!shared->answered[head.id]++,
			      "datagram %u was answered twice", head.id);
			shared->replies_received++;
		}
	}
}

/* Answers most datagrams that have a sender, by one of two calls. */
static void answer(struct actor *actor, int fd, const char *buffer,
		   struct sockaddr_in *peer)
{
	struct datagram head;
	struct iovec part = { &head, sizeof(head) };
	struct msghdr message = { .msg_name = peer,
				  .msg_namelen = sizeof(*peer),
				  .msg_iov = &part,
				  .msg_iovlen = 1 };
	ssize_t sent;

	if (!draw(actor, 4) ||
	    shared->replies - shared->replies_received >= REPLIES_MAX)
		return;
	memcpy(&head, buffer, sizeof(head));
	head.check = ~head.check;
	/* Counted before it can arrive. */
	shared->replies++;
	if (draw(actor, 2))
		sent = sendmsg(fd, &message, 0);
	else
		sent = sendto(fd, &head, sizeof(head), 0, (void *)peer,
			      sizeof(*peer));
	CHECK(sent == sizeof(head), "an answer: %zd: %m", sent);
	shared->calls++;
}

/* Checks a datagram that was received on the shared socket `at`. */
static void check_datagram(uint32_t at, const char *buffer, ssize_t len,
			   const struct sockaddr_in *peer)
{
	const struct datagram *head = (const void *)buffer;

	CHECK(len >= (ssize_t)sizeof(*head) && len == head->len,
	      "socket %u: %zd bytes, not %u", at, len, head->len);
	CHECK(head->check == check_of(head) && head->seed == shared->seed,
	      "socket %u: not what was sent", at);
	CHECK(head->socket == at, "socket %u got a datagram for socket %u", at,
	      head->socket);
	CHECK(!peer || (peer->sin_family == AF_INET &&
			peer->sin_addr.s_addr == htonl(INADDR_LOOPBACK) &&
			peer->sin_port),
	      "socket %u: no peer", at);
	CHECK(!shared->seen[head->id]++, "datagram %u was received twice",
	      head->id);
	shared->socket[at].received++;
}

static long now_ms(clockid_t clock)
{
	struct timespec time;

	clock_gettime(clock, &time);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Receives by one of the calls: the number of datagrams, or -1. */
static int receive(struct actor *actor, uint32_t at, int fd, int flags)
{
	static _Thread_local char buffer[4][2048];
	struct sockaddr_in peer[4];
	socklen_t len = sizeof(peer[0]);
	struct iovec parts[4][2];
	struct mmsghdr many[4];
	ssize_t got;

	memset(peer, 0, sizeof(peer));
	memset(many, 0, sizeof(many));
	for (int i = 0; i < 4; i++) {
		parts[i][0] = (struct iovec){ buffer[i], 10 };
		parts[i][1] = (struct iovec){ buffer[i] + 10,
					      sizeof(buffer[i]) - 10 };
		many[i].msg_hdr.msg_iov = parts[i];
		many[i].msg_hdr.msg_iovlen = 2;
		many[i].msg_hdr.msg_name = &peer[i];
		many[i].msg_hdr.msg_namelen = sizeof(peer[i]);
	}
	shared->calls++;
	switch (draw(actor, flags ? 5 : 7)) {
	case 0:
		got = recv(fd, buffer[0], sizeof(buffer[0]), flags);
		peer[0].sin_family = 0;
		break;
	case 1:
	case 2:
		got = recvfrom(fd, buffer[0], sizeof(buffer[0]), flags,
			       (void *)peer, &len);
		CHECK(got < 0 || len == sizeof(peer[0]),
		      "length of the peer: %u", len);
		break;
	case 3:
		got = recvmsg(fd, &many[0].msg_hdr, flags);
		CHECK(got < 0 || !(many[0].msg_hdr.msg_flags & MSG_TRUNC),
		      "truncated");
		break;
	case 4: {
		int count = recvmmsg(
			fd, many, 4,
			flags | (flags & MSG_DONTWAIT ? 0 : MSG_WAITFORONE),
			NULL);

		CHECK(count != 0 && count <= 4, "recvmmsg: %d", count);
		for (int i = 0; i < count; i++) {
			check_datagram(at, buffer[i], many[i].msg_len,
				       &peer[i]);
			answer(actor, fd, buffer[i], &peer[i]);
		}
		return count;
	}
	case 5:
		got = read(fd, buffer[0], sizeof(buffer[0]));
		break;
	default:
		got = readv(fd, parts[0], 2);
	}
	if (got < 0)
		return -1;
	check_datagram(at, buffer[0], got,
		       peer[0].sin_family ? &peer[0] : NULL);
	if (peer[0].sin_family)
		answer(actor, fd, buffer[0], &peer[0]);
	return 1;
}

/* Receives until the queue is empty, or a few times. */
static void receive_queued(struct actor *actor, uint32_t at, int fd,
			   bool all_of_it)
{
	for (int left = all_of_it || shared->quiet ? 100000 :
						     1 + (int)draw(actor, 8);
	     left > 0; left--) {
		if (receive(actor, at, fd, MSG_DONTWAIT) < 0) {
			CHECK(errno == EAGAIN, "socket %u: receive: %m", at);
			return;
		}
	}
}

static void by_blocking(struct actor *actor, uint32_t at, int fd)
{
	do {
		/*
		 * The kernel's timeouts count in ticks. After a stall of the
		 * machine, these are behind the clock for a moment, and catch
		 * up during the call. The coarse clock shows that, because it
		 * counts the same ticks.
		 */
		long start = now_ms(CLOCK_MONOTONIC), passed;
		long ticks = now_ms(CLOCK_MONOTONIC_COARSE);

		if (receive(actor, at, fd, 0) >= 0)
			continue;
		CHECK(errno == EAGAIN || errno == EINTR,
		      "socket %u: blocking receive: %m", at);
		passed = now_ms(CLOCK_MONOTONIC) - start;
		ticks = now_ms(CLOCK_MONOTONIC_COARSE) - ticks;
		CHECK(errno != EAGAIN || passed >= TIMEOUT_MS / 10 ||
			      ticks >= TIMEOUT_MS / 10,
		      "socket %u: the timeout came after %ld ms, %ld in ticks",
		      at, passed, ticks);
		return;
	} while (shared->quiet);
}

static void by_poll(struct actor *actor, uint32_t at, int fd)
{
	struct pollfd one = { .fd = fd, .events = POLLIN };
	struct timespec time = { .tv_nsec = TIMEOUT_MS * 1000000 };
	int ready = draw(actor, 2) ? poll(&one, 1, TIMEOUT_MS) :
				     ppoll(&one, 1, &time, NULL);

	CHECK(ready >= 0 || errno == EINTR, "poll: %m");
	CHECK(ready <= 0 || one.revents == POLLIN, "socket %u: poll says %x",
	      at, one.revents);
	if (ready > 0)
		receive_queued(actor, at, fd, draw(actor, 2));
}

static void by_select(struct actor *actor, uint32_t at, int fd)
{
	struct timeval time = { .tv_usec = TIMEOUT_MS * 1000 };
	fd_set set;

	if (fd >= FD_SETSIZE)
		return;
	FD_ZERO(&set);
	FD_SET(fd, &set);
	int ready = select(fd + 1, &set, NULL, NULL, &time);

	CHECK(ready >= 0 || errno == EINTR, "select: %m");
	if (ready > 0) {
		CHECK(FD_ISSET(fd, &set), "select says %d and no descriptor",
		      ready);
		receive_queued(actor, at, fd, draw(actor, 2));
	}
}

static void by_epoll(struct actor *actor, uint32_t at, int fd, bool edge)
{
	struct epoll_event event = { .events = EPOLLIN | (edge ? EPOLLET : 0),
				     .data.u64 = 0x1234567800000000 | at };
	int *epoll = &actor->epoll[at];

	if (*epoll < 0) {
		*epoll = epoll_create1(EPOLL_CLOEXEC);
		CHECK(*epoll >= 0, "epoll_create1: %m");
		CHECK(!epoll_ctl(*epoll, EPOLL_CTL_ADD, fd, &event),
		      "EPOLL_CTL_ADD: %m");
		CHECK(epoll_ctl(*epoll, EPOLL_CTL_ADD, fd, &event) < 0 &&
			      errno == EEXIST,
		      "added twice: %m");
	} else if (!draw(actor, 200)) {
		CHECK(!epoll_ctl(*epoll, EPOLL_CTL_MOD, fd, &event),
		      "EPOLL_CTL_MOD: %m");
	} else if (!draw(actor, 200)) {
		CHECK(!epoll_ctl(*epoll, EPOLL_CTL_DEL, fd, NULL),
		      "EPOLL_CTL_DEL: %m");
		CHECK(epoll_ctl(*epoll, EPOLL_CTL_DEL, fd, NULL) < 0 &&
			      errno == ENOENT,
		      "deleted twice: %m");
		CHECK(!epoll_ctl(*epoll, EPOLL_CTL_ADD, fd, &event),
		      "EPOLL_CTL_ADD again: %m");
	} else if (!draw(actor, 200)) {
		close(*epoll);
		*epoll = -1;
		return;
	}
	struct epoll_event found = { 0 };
	int ready = epoll_wait(*epoll, &found, 1, TIMEOUT_MS);

	shared->calls++;
	CHECK(ready >= 0 || errno == EINTR, "epoll_wait: %m");
	if (ready <= 0)
		return;
	CHECK(found.data.u64 == event.data.u64 && found.events == EPOLLIN,
	      "epoll says %x for %llx", found.events,
	      (unsigned long long)found.data.u64);
	/* With edges, all must be received: they are not reported again. */
	receive_queued(actor, at, fd, edge || draw(actor, 2));
}

void receive_shared(struct actor *actor)
{
	/*
	 * Event loops have lanes, and other receivers disturb them. When the
	 * senders pause, all receive on all sockets.
	 */
	uint32_t at = actor->favourite;

	if (shared->quiet) {
		at = actor->round++ % SOCKETS;
		shared->polls[actor->number]++;
	} else if (!draw(actor, 30))
		at = draw(actor, SOCKETS);
	shared->last[actor->number] = at;
	shared->line[actor->number] = __LINE__;
	struct shared_socket *one = &shared->socket[at];
	enum way way =
		one->way == WAY_MIXED ? draw(actor, WAY_MIXED) : one->way;
	int fd = one->fd;
	bool copied = !draw(actor, 100);

	if (copied) {
		fd = draw(actor, 2) ? dup(fd) :
				      fcntl(fd, F_DUPFD_CLOEXEC,
					    draw(actor, 2) ? 3 : 1500);
		CHECK(fd >= 0, "dup: %m");
	}
	shared->line[actor->number] = __LINE__;
	if (!draw(actor, 50))
		change_shared(actor, fd, one->way == WAY_MIXED);
	/*
	 * An edge is reported to one instance for one descriptor: a copy is
	 * another one.
	 */
	if (copied && (way == WAY_EPOLL || way == WAY_EDGE))
		way = WAY_POLL;
	shared->line[actor->number] = __LINE__;
	switch (way) {
	case WAY_BLOCK:
		by_blocking(actor, at, fd);
		break;
	case WAY_SELECT:
		by_select(actor, at, fd);
		break;
	case WAY_EPOLL:
	case WAY_EDGE:
		by_epoll(actor, at, fd, way == WAY_EDGE);
		break;
	default:
		by_poll(actor, at, fd);
	}
	if (copied)
		CHECK(!close(fd), "close of a copy: %m");
}

/* Passes a descriptor to this process: it works there as here. */
static void pass_descriptor(int fd)
{
	int pair[2], found = -1;
	char byte = 0, room[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &part,
			      .msg_iovlen = 1,
			      .msg_control = room,
			      .msg_controllen = sizeof(room) };
	struct cmsghdr *control = CMSG_FIRSTHDR(&msg);

	control->cmsg_level = SOL_SOCKET;
	control->cmsg_type = SCM_RIGHTS;
	control->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(control), &fd, sizeof(fd));
	CHECK(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair), "socketpair: %m");
	CHECK(sendmsg(pair[0], &msg, 0) == 1, "passing: %m");
	CHECK(recvmsg(pair[1], &msg, MSG_CMSG_CLOEXEC) == 1,
	      "being passed: %m");
	memcpy(&found, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(found));
	close(found);
	close(pair[0]);
	close(pair[1]);
}

static int reuseport(int fd)
{
	int value = -1;
	socklen_t len = sizeof(value);

	usleep(100000);
	getsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &value, &len);
	return value;
}

/* Calls that query a socket or start processes, and receive no datagram. */
void change_shared(struct actor *actor, int fd, bool may_fall_back)
{
	char buffer[2048];
	int value = -1;
	socklen_t len = sizeof(value);
	struct sockaddr_in addr;
	pid_t pid;

	shared->calls++;
	switch (draw(actor, 8)) {
	case 0:
		len = sizeof(addr);
		CHECK(!getsockname(fd, (void *)&addr, &len) &&
			      len == sizeof(addr) && addr.sin_port,
		      "getsockname: %m");
		break;
	case 1:
		CHECK(!getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &len) &&
			      value == SOCK_DGRAM,
		      "SO_TYPE: %d", value);
		CHECK(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &len) &&
			      !value,
		      "SO_ERROR: %d", value);
		CHECK(!getsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &value, &len) &&
			      !value,
		      "descriptor %d: SO_REUSEPORT: %d, and again: %d", fd,
		      value, reuseport(fd));
		break;
	case 2:
		CHECK(!ioctl(fd, FIONREAD, &value) && value >= 0 &&
			      value <= LENGTH_MAX,
		      "FIONREAD: %d", value);
		break;
	case 3: {
		ssize_t got = recv(fd, buffer, sizeof(buffer),
				   MSG_PEEK | MSG_DONTWAIT);
		const struct datagram *head = (const void *)buffer;

		CHECK(got >= 0 || errno == EAGAIN, "MSG_PEEK: %m");
		CHECK(got < 0 || (head->check == check_of(head) &&
				  head->len == got),
		      "MSG_PEEK: not what was sent");
		break;
	}
	case 4: {
		int other = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

		len = sizeof(addr);
		getsockname(fd, (void *)&addr, &len);
		CHECK(bind(other, (void *)&addr, sizeof(addr)) < 0 &&
			      errno == EADDRINUSE,
		      "bound twice: %m");
		close(other);
		CHECK(bind(fd, (void *)&addr, sizeof(addr)) < 0 &&
			      errno == EINVAL,
		      "bound again: %m");
		break;
	}
	case 5:
		if (draw(actor, 20))
			break;
		pid = fork();
		if (!pid)
			_exit(recv(fd, buffer, sizeof(buffer),
				   MSG_PEEK | MSG_DONTWAIT) >= 0 ||
					      errno == EAGAIN ?
				      0 :
				      1);
		CHECK(pid > 0 && waitpid(pid, &value, 0) == pid && !value,
		      "a child: %x %m", value);
		break;
	case 6: {
		char *words[] = { "true", NULL }, *nothing[] = { NULL };

		/*
		 * The descriptor may stay open in the program: it could
		 * receive.
		 */
		if (!may_fall_back || draw(actor, 20))
			break;
		CHECK(!posix_spawn(&pid, "/bin/true", NULL, NULL, words,
				   nothing),
		      "posix_spawn");
		CHECK(waitpid(pid, &value, 0) == pid && !value,
		      "a program: %x %m", value);
		break;
	}
	default:
		if (may_fall_back && !draw(actor, 50))
			pass_descriptor(fd);
	}
}

void end_actor(struct actor *actor)
{
	for (int at = 0; at < SOCKETS; at++) {
		if (actor->epoll[at] >= 0)
			close(actor->epoll[at]);
		actor->epoll[at] = -1;
	}
}
