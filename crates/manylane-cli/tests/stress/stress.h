/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Random calls on UDP sockets, checked against what the kernel would do. It
 * knows nothing of Manylane, and has to pass without it as well.
 */
#ifndef STRESS_H
#define STRESS_H

#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>

/* Shared sockets, by how they are received on. */
enum way {
	WAY_BLOCK, /* blocking receives with a timeout */
	WAY_POLL,  /* poll, then non-blocking receives */
	WAY_SELECT,
	WAY_EPOLL, /* an epoll instance for each receiver */
	WAY_EDGE,  /* the same, edge-triggered */
	WAY_MIXED, /* anything at any time */
	WAYS,
};

#define SOCKETS (2 * WAYS)
#define THREADS 8
#define CHILDREN 3
#define RECEIVERS (THREADS + CHILDREN)
#define SENDERS 2
#define FLOWS 8
/* Datagrams of a socket in flight: every receive buffer has room for them. */
#define WINDOW 48
/* Replies in flight: the receive buffer of each flow has room for them. */
#define REPLIES_MAX 100
#define DATAGRAMS_MAX (1u << 28)
#define TIMEOUT_MS 20

struct datagram {
	uint64_t seed; /* identifies this run */
	uint32_t socket;
	uint32_t id;
	uint32_t len;
	uint32_t check;
};

struct shared_socket {
	int fd;
	enum way way;
	struct sockaddr_in addr;
	_Atomic uint32_t sent, received;
};

/* Mapped shared: threads and children write it. */
struct shared {
	uint64_t seed;
	_Atomic bool quiet;	    /* senders pause */
	_Atomic bool stop;	    /* receivers end */
	_Atomic uint32_t receiving; /* receivers that may receive, a bit each */
	_Atomic uint32_t idle;	/* receivers that were told to pause, and do */
	_Atomic uint32_t ids;	/* datagrams so far */
	_Atomic uint64_t calls; /* calls so far */
	_Atomic uint32_t
		late; /* datagrams that arrived after a call that should have found them */
	_Atomic uint32_t failures;
	/* Polls of each receiver while senders pause. */
	_Atomic uint32_t polls[RECEIVERS];
	/* The position of each receiver, for the report of a failure. */
	_Atomic uint32_t process[RECEIVERS], thread[RECEIVERS];
	_Atomic uint32_t last[RECEIVERS], line[RECEIVERS];
	/* Replies that were sent, and that arrived. */
	_Atomic uint32_t replies, replies_received;
	struct shared_socket socket[SOCKETS];
	_Atomic uint8_t seen[DATAGRAMS_MAX]; /* how often each was received */
	_Atomic uint8_t
		answered[DATAGRAMS_MAX]; /* how often its answer arrived */
};

extern struct shared *shared;

/* A thread or child. */
struct actor {
	uint32_t number;
	uint64_t random;
	uint32_t favourite; /* the shared socket that it mostly receives on */
	uint32_t round;
	int epoll[SOCKETS]; /* -1 for none */
};

uint32_t draw(struct actor *actor, uint32_t below);
__attribute__((format(printf, 1, 2))) void fail(const char *format, ...);
#define CHECK(cond, ...)                   \
	do {                               \
		if (!(cond))               \
			fail(__VA_ARGS__); \
	} while (0)

/* shared.c: sockets that all receive on. */
void open_shared(void);
void receive_shared(struct actor *actor);
void change_shared(struct actor *actor, int fd, bool may_fall_back);
void end_actor(struct actor *actor);
void send_shared(struct actor *actor, const int *flows);
void receive_answers(const int *flows);

/* private.c: sockets of one thread, whose state is known. */
void use_private(struct actor *actor);

/* hang_report.c: reports what all threads do. */
void report_all(void);
uint32_t queued_bytes(in_port_t port);

#endif /* STRESS_H */
