/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Queued datagrams, so that only results that have to be equal are printed.
 *
 * The queries here are system calls that are not part of the test.
 */
#include "differential.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A descriptor that no script uses. */
#define MARKER 1022

/* The kernel's range of ports, as one block for each name. */
#define FIRST_PORT 32768u
#define BLOCK 110u
#ifndef IP_LOCAL_PORT_RANGE
#define IP_LOCAL_PORT_RANGE 51
#endif

/*
 * Lets the kernel select a port from a block of the socket's own (Linux 6.3).
 * Otherwise two sockets may share one: of IPv4 and IPv6, or of before and after
 * a close. Processes on one network would share the blocks.
 */
void give_ports(int fd)
{
	int saved = errno;
	uint32_t first = FIRST_PORT + shared->sockets++ % PORTS * BLOCK;
	uint32_t range = first | (first + BLOCK - 1) << 16;

	if (has_own_network)
		syscall(SYS_setsockopt, fd, SOL_IP, IP_LOCAL_PORT_RANGE, &range,
			sizeof(range));
	errno = saved;
}

/* 0 if the program has no such descriptor, even if another one has it. */
static uint64_t inode(int fd)
{
	struct stat stat;
	int saved = errno;
	bool is_open = fcntl(fd, F_GETFD) >= 0 && !fstat(fd, &stat);
	uint64_t number = is_open ? stat.st_ino : 0;

	errno = saved;
	return number;
}

/* Also true if it is neither bound nor connected. */
bool is_udp(int fd)
{
	int saved = errno, protocol = 0;
	socklen_t size = sizeof(int);

	syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size);
	errno = saved;
	return protocol == IPPROTO_UDP;
}

static struct queue *queue_at(int fd, long call)
{
	struct sockaddr_storage addr = { 0 };
	socklen_t len = sizeof(addr), size = sizeof(int);
	int saved = errno, type = 0;
	struct queue *queue = NULL;

	if (!syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_TYPE, &type, &size) &&
	    type == SOCK_DGRAM && !syscall(call, fd, &addr, &len))
		queue = queue_to(&addr);
	errno = saved;
	return queue;
}

/* The queue of the port that a socket is or was bound to; NULL if none. */
struct queue *queue_of(int fd)
{
	struct queue *queue = queue_at(fd, SYS_getsockname);
	uint64_t number = inode(fd);

	for (uint32_t at = 1; number && !queue && at < shared->ports; at++)
		if (shared->queue[at].socket == number)
			queue = &shared->queue[at];
	if (queue)
		queue->socket = number;
	return queue;
}

/* The queue of the peer that it is connected to. */
struct queue *queue_of_peer(int fd)
{
	return queue_at(fd, SYS_getpeername);
}

struct queue *queue_to(const struct sockaddr_storage *addr)
{
	uint32_t number = 0;

	if (addr->ss_family == AF_INET || addr->ss_family == AF_INET6)
		number = port_number(
			((const struct sockaddr_in *)addr)->sin_port);
	return number ? &shared->queue[number] : NULL;
}

bool is_ordered(const struct queue *queue)
{
	return !queue || (!queue->is_mixed && !queue->is_unordered);
}

/* True if a datagram may be sent: afterwards, the order is still known. */
bool may_send(int fd, struct queue *queue, size_t *len)
{
	uint64_t flow = inode(fd);

	if (shared->payloads >= PAYLOADS - 1)
		return false;
	if (!queue)
		return true;
	if (!queue->flow)
		queue->flow = flow;
	if (queue->flow != flow) {
		if (queue->is_unnamed)
			return false;
		queue->is_mixed = true;
	}
	if (!is_ordered(queue) && *len < 2)
		*len = 2;
	queue->is_unnamed |= *len < 2;
	queue->queued++;
	return true;
}

/* Writes the next payload: its number, and unique data. */
void write_payload(int fd, char *buffer, size_t len)
{
	uint32_t number = ++shared->payloads;

	shared->sender[number] = inode(fd);
	for (size_t at = 0; at < len; at++)
		buffer[at] = (char)(number * 31 + at);
	if (len >= 2) {
		buffer[0] = (char)number;
		buffer[1] = (char)(number >> 8);
	}
}

/*
 * Waits until the datagram is delivered. If the kernel's softirq has run out of
 * time, it is not delivered yet: a later one, on the same CPU, is waited for.
 */
void wait_for_delivery(void)
{
	static struct sockaddr_in addr;
	socklen_t len = sizeof(addr);
	int saved = errno;
	char byte = 0;

	if (syscall(SYS_sendto, MARKER, &byte, 1, 0, &addr, len) != 1) {
		int fd = (int)syscall(SYS_socket, AF_INET, SOCK_DGRAM, 0);

		addr = (struct sockaddr_in){ .sin_family = AF_INET,
					     .sin_addr.s_addr =
						     htonl(INADDR_LOOPBACK) };
		give_ports(fd);
		syscall(SYS_bind, fd, &addr, len);
		syscall(SYS_getsockname, fd, &addr, &len);
		syscall(SYS_dup3, fd, MARKER, O_CLOEXEC);
		syscall(SYS_close, fd);
		syscall(SYS_sendto, MARKER, &byte, 1, 0, &addr, len);
	}
	syscall(SYS_recvfrom, MARKER, &byte, 1, 0, NULL, NULL);
	errno = saved;
}

void received(struct queue *queue, const char *buffer, size_t len)
{
	uint32_t number =
		len < 2 ? 0 : (uint8_t)buffer[0] | (uint8_t)buffer[1] << 8;

	if (queue->count < PAYLOADS)
		queue->received[queue->count++] = number % PAYLOADS;
}

/* True if the datagram was received, and before all others of its flow. */
static bool is_first(const struct queue *queue, uint32_t number)
{
	for (uint32_t at = 0; at < queue->count; at++) {
		if (queue->received[at] == number)
			return true;
		if (shared->sender[queue->received[at]] ==
		    shared->sender[number])
			return false;
	}
	return false;
}

static void say_received(struct queue *queue)
{
	for (uint32_t first = 0; first < PAYLOADS && queue->count; first++) {
		if (queue->is_unordered) {
			for (uint32_t at = 0; at < queue->count; at++)
				if (queue->received[at] == first)
					print(" #%u", first);
			continue;
		}
		if (!is_first(queue, first))
			continue;
		print(" flow");
		for (uint32_t at = 0; at < queue->count; at++)
			if (shared->sender[queue->received[at]] ==
			    shared->sender[first])
				print(" #%u", queue->received[at]);
	}
}

/* True if all receivers have returned, so that lanes stay. */
static bool is_settled(const struct queue *queue, bool *may_change)
{
	int actors = 0;
	bool settled = true;

	for (int at = 0; at < ACTORS; at++) {
		actors += queue->receives[at] > 0;
		settled &= !queue->receives[at] || queue->receives[at] == 3;
	}
	/* Datagrams that the first lanes find queued precede all others. */
	*may_change = actors > 2 || queue->some_left;
	return settled;
}

void count_receive(struct queue *queue, int actor, uint32_t datagrams)
{
	bool may_change, settled;

	if (!queue)
		return;
	/* An empty receive does not count. */
	if (queue->receives[actor] < 3)
		queue->receives[actor]++;
	settled = is_settled(queue, &may_change);
	queue->queued -= datagrams < queue->queued ? datagrams : queue->queued;
	queue->is_older = queue->queued && (queue->is_older || queue->calm < 3);
	queue->calm = settled ? queue->calm + (queue->calm < 3) : 0;
	if (may_change && queue->calm < 3 && queue->queued)
		queue->is_unordered = true;
}

/* A receive was empty: prints what was received since the last time. */
void print_received_set(struct queue *queue)
{
	bool may_change;

	if (!queue)
		return;
	if (!is_settled(queue, &may_change))
		queue->calm = 0;
	say_received(queue);
	queue->flow = queue->queued = queue->count = 0;
	queue->is_mixed = queue->is_unordered = queue->is_unnamed = false;
	queue->is_older = false;
}

/*
 * An actor has ended, and its lanes with it. For a process, that is noticed
 * later.
 */
void on_actor_exit(int actor)
{
	for (uint32_t at = 1; at < shared->ports; at++) {
		struct queue *queue = &shared->queue[at];

		queue->is_unordered |= queue->queued || shared->has_forked;
		queue->receives[actor] = queue->calm = 0;
		queue->some_left = true;
	}
}

/* A long wait: an idle thread may lose its lane meanwhile, and get it back. */
void on_long_wait(void)
{
	for (uint32_t at = 1; at < shared->ports; at++) {
		struct queue *queue = &shared->queue[at];

		queue->is_unordered |= queue->queued > 0;
		queue->calm = 0;
		queue->some_left = true;
		/* Each gets it back when it receives again. */
		for (int actor = 0; actor < ACTORS; actor++)
			queue->receives[actor] = !!queue->receives[actor];
	}
}

/*
 * A call after which a socket may have no lanes. Their datagrams then precede
 * those that were queued when the lanes were added, unless these have been
 * received.
 */
void on_possible_fallback(void)
{
	for (uint32_t at = 1; at < shared->ports; at++)
		shared->queue[at].is_unordered |= shared->queue[at].is_older;
}

/*
 * A process may have closed a descriptor that others still have, and that the
 * kernel still watches for its instances, by any lane.
 */
void on_close(void)
{
	shared->has_left_watched |= shared->has_forked && shared->has_watched;
	for (uint32_t at = 1; at < shared->ports && shared->has_forked; at++) {
		shared->queue[at].is_unordered = true;
		shared->queue[at].some_left = true;
	}
}

void set_timeout(int fd, bool is_set)
{
	uint64_t number = inode(fd);
	uint32_t at = 0;

	while (at < shared->timeouts && shared->timeout[at] != number)
		at++;
	if (at == PAYLOADS)
		return;
	shared->timeout[at] = is_set ? number : 0;
	if (at == shared->timeouts)
		shared->timeouts++;
}

/* True if a receive may wait forever. The same in every run. */
bool would_block(int fd)
{
	int saved = errno;
	long flags = syscall(SYS_fcntl, fd, F_GETFL, 0);
	uint64_t number = inode(fd);
	struct stat stat;
	bool blocks = number && flags >= 0 && !(flags & O_NONBLOCK) &&
		      !fstat(fd, &stat) && !S_ISREG(stat.st_mode);

	for (uint32_t at = 0; at < shared->timeouts; at++)
		blocks &= shared->timeout[at] != number;
	errno = saved;
	return blocks;
}
