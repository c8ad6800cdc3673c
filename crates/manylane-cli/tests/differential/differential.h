/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Runs a script of calls, one after the other, and prints what each returned.
 * Knows nothing of Manylane: scripts/differential.py runs it with and without,
 * and compares.
 */
#ifndef DIFFERENTIAL_H
#define DIFFERENTIAL_H

#define _GNU_SOURCE
#include <netinet/in.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

/* Actors: threads of the first process, then forked children. */
#define THREADS 4
#define ACTORS 6
#define SLOTS 16     /* s0 to s15: descriptors */
#define ADDRESSES 8  /* a0 to a7: addresses that sockets were bound to */
#define PORTS 256    /* ports that the output names */
#define ARGUMENTS 24 /* of a step */
#define PAYLOADS 512 /* datagrams of a script */
#define LOG (1 << 17)

/*
 * What is queued for a port. While that is of one flow and lanes do not change,
 * the order is known, and each receive is compared. Else what came is compared
 * once all of it has come: by flow, or if lanes changed, as a set.
 */
struct queue {
	uint64_t socket; /* inode of the one that it is of */
	uint64_t flow; /* inode of the sending socket, 0 if nothing is queued */
	bool is_mixed; /* several flows */
	bool is_unordered; /* lanes may have changed */
	bool is_unnamed;   /* a datagram too short to carry its number */
	uint32_t queued;
	uint16_t received[PAYLOADS]; /* in the order in which they came */
	uint32_t count;
	/* About lanes: they come when all that receive have come back. */
	uint8_t receives[ACTORS];
	uint8_t calm; /* receives since then */
	bool some_left;
	bool is_older; /* something may be from before there were lanes */
};

struct log {
	size_t len;
	char text[LOG];
};

/* Mapped shared: children have it, too. */
struct shared {
	sem_t turn[ACTORS], done[ACTORS];
	pid_t pid[ACTORS];
	size_t next; /* line of the script */
	bool is_pair;
	size_t beside[ACTORS]; /* the line that an actor makes beside others */
	_Atomic bool began[ACTORS]; /* it knows what is queued */
	bool has_forked;
	bool has_watched; /* a socket by an epoll instance */
	bool has_edges;	  /* by their edges */
	int changed_by;	  /* processes that changed instances since a fork */
	bool has_left_watched; /* such a socket may be closed, but elsewhere */
	uint32_t payloads;
	struct sockaddr_storage address[ADDRESSES];
	in_port_t port[PORTS]; /* by number; 0 is none */
	struct queue queue[PORTS];
	uint32_t ports;
	uint64_t sender[PAYLOADS]; /* inode of the socket that sent each */
	uint64_t timeout
		[PAYLOADS]; /* inodes of sockets with a receive timeout */
	uint32_t timeouts;
	struct log log, log_beside[ACTORS];
};

struct argument {
	long value;
	int slot; /* -1 if the value is not a slot's */
};

struct step {
	int actor;
	char *name;
	struct argument arg[ARGUMENTS];
	int args;
};

extern struct shared *all;
extern int slots[SLOTS];

/* script.c */
extern _Thread_local struct log *log_here; /* where say() writes */
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);
void say_result(long result);
bool parse(char *line, struct step *step);
uint32_t port_number(in_port_t port);
void say_address(const struct sockaddr_storage *addr, socklen_t len);

/* calls.c, receives.c: what every step but fork, exit and end does. */
void run(struct step *step);
bool run_receive(struct step *step);

/* queues.c: what is on its way. */
bool is_udp(int fd);
struct queue *queue_of(int fd);
struct queue *queue_to(const struct sockaddr_storage *addr);
struct queue *queue_of_peer(int fd);
bool may_send(int fd, struct queue *queue, size_t *len);
void fill(int fd, char *buffer, size_t len);
void delivered(void);
bool is_ordered(const struct queue *queue);
void received(struct queue *queue, const char *buffer, size_t len);
void took(struct queue *queue, int actor, uint32_t datagrams);
void emptied(struct queue *queue);
void left(int actor);
void waited(void);
void may_fall_back(void);
void closed(void);
void set_timeout(int fd, bool is_set);
bool would_block(int fd);

#endif
