/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Runs a script of calls, one after the other, and prints the result of each.
 * It knows nothing of Manylane: scripts/differential.py runs it with and
 * without, and compares.
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
 * The datagrams queued for a port, which stands for its socket (give_ports).
 * As long as they are of one flow and lanes do not change, the order is known,
 * and each receive is compared. Otherwise the datagrams are compared once all
 * of them have been received: by flow, or as a set if lanes changed.
 */
struct queue {
	uint64_t socket; /* inode of the receiving socket */
	uint64_t flow; /* inode of the sending socket, 0 if nothing is queued */
	bool is_mixed; /* several flows */
	bool is_unordered; /* lanes may have changed */
	bool is_unnamed;   /* a datagram too short to carry its number */
	uint32_t queued;
	uint16_t received[PAYLOADS]; /* in the order of their receipt */
	uint32_t count;
	/* About lanes: they are added when all receivers have returned. */
	uint8_t receives[ACTORS];
	uint8_t calm; /* receives since then */
	bool some_left;
	bool is_older; /* datagrams may be from before the lanes */
};

struct log {
	size_t len;
	char text[LOG];
};

/* Mapped shared with children. */
struct shared {
	sem_t turn[ACTORS], done[ACTORS];
	pid_t pid[ACTORS];
	size_t next; /* line of the script */
	bool is_pair;
	size_t beside[ACTORS]; /* the line that an actor runs beside others */
	/* When it has checked the queue and begun to wait; 0 before. */
	_Atomic long begun_ms[ACTORS];
	bool has_forked;
	bool has_watched; /* an epoll instance has watched a socket */
	bool has_edges;	  /* edge-triggered */
	int changed_by;	  /* processes that changed instances since a fork */
	bool has_left_watched; /* such a socket may be closed, but elsewhere */
	uint32_t payloads;
	struct sockaddr_storage address[ADDRESSES];
	in_port_t port[PORTS]; /* by number; 0 is none */
	struct queue queue[PORTS];
	uint32_t ports;
	uint32_t sockets;	   /* that have a block of ports */
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

extern struct shared *shared;
extern int slots[SLOTS];
extern bool has_own_network;

/* script.c */
extern _Thread_local struct log *current_log; /* where print() writes */
__attribute__((format(printf, 1, 2))) void print(const char *format, ...);
void print_result(long result);
long now_ms(void);
bool parse(char *line, struct step *step);
uint32_t port_number(in_port_t port);
void print_address(const struct sockaddr_storage *addr, socklen_t len);

/* A step's name and function. */
struct call {
	const char *name;
	void (*run)(struct step *step);
};

#define STEP(name) ((struct call){ #name, step_##name })
#define ARG(n) (step->arg[n].value)
#define FD ((int)ARG(0))

/* calls.c: runs all steps except fork, exit and end. */
void run(struct step *step);
/* Runs a step if it is one of `calls`. */
bool run_call(const struct call *calls, size_t count, struct step *step);

/* Steps by what they do, in files of those names. */
bool run_receive(struct step *step);
bool run_send(struct step *step);
bool run_wait(struct step *step);
bool run_socket(struct step *step);
bool run_descriptor(struct step *step);

/* descriptors.c: prints a new descriptor, and puts it into a slot. */
void store_new_fd(struct step *step, int at, long fd);

static inline socklen_t len_of(const struct sockaddr_storage *addr)
{
	return addr->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) :
					     sizeof(struct sockaddr_in);
}

/* queues.c: datagrams in flight. */
void give_ports(int fd);
bool is_udp(int fd);
struct queue *queue_of(int fd);
struct queue *queue_to(const struct sockaddr_storage *addr);
struct queue *queue_of_peer(int fd);
bool may_send(int fd, struct queue *queue, size_t *len);
void write_payload(int fd, char *buffer, size_t len);
void wait_for_delivery(void);
bool is_ordered(const struct queue *queue);
void received(struct queue *queue, const char *buffer, size_t len);
void count_receive(struct queue *queue, int actor, uint32_t datagrams);
void print_received_set(struct queue *queue);
void on_actor_exit(int actor);
void on_long_wait(void);
void on_possible_fallback(void);
void on_close(void);
void set_timeout(int fd, bool is_set);
bool would_block(int fd);

#endif
