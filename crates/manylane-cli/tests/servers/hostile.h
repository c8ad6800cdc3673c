/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The parts of a hostile program (hostile.c). */
#ifndef HOSTILE_H
#define HOSTILE_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_xdp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "manylane_lease.h"
#include "manylane_next_hops.h"

/* Seconds: a process may get no CPU time for long. */
#define TIMEOUT_S 100

/* The rings of a queue. The kernel consumes the last two. */
enum {
	RX,
	COMPLETION,
	TX,
	FILL,
	RINGS
};

struct ring {
	char *at;
	size_t len, slots; /* offset of the slots */
	volatile uint32_t *producer, *consumer;
	uint32_t entries;
};

/* The lease of one socket. */
struct lease {
	int end, count;
	int next_hops, xsk[MLL_QUEUES_MAX], memory[MLL_QUEUES_MAX];
	struct mll_queue terms[MLL_QUEUES_MAX];
	struct ring rings[MLL_QUEUES_MAX][RINGS];
	char *bytes[MLL_QUEUES_MAX];
	size_t len[MLL_QUEUES_MAX];
};

/* hostile_lease.c */
extern const char *ip, *marker;
extern int port, peer; /* `peer` sends the datagrams */
extern pid_t server;   /* runs after this, or beside it */
int send_message(int end, uint32_t kind, const uint32_t *words, const int *fds,
		 int count);
/* Receives a message; returns its kind, 0 if the other end is closed. */
uint32_t receive_message(int end, struct mll_message *message, int *fds);
void secret(uint32_t *words);
int try_connect_launcher(int flags);
int connect_launcher(void);
void print_message(const char *what, uint32_t kind,
		   const struct mll_message *message);
int open_udp(const char *at, int reuse);
/* Requests queues for a socket; true if it gets some. */
int request_lease(struct lease *lease, const char *what, int fd);
void send_command(struct lease *lease, const char *what, uint32_t kind);
void send_to_port(const char *text);
int ring_contains(const struct lease *lease, const char *text);
/* Sends until `is` returns true. */
int send_until(int (*is)(void *), void *with, const char *text);
int arrived(void *lease);
const char *yes_or_no(int is);
/* Prints whether the socket itself receives datagrams. */
void serves(const char *what, int fd);
void run_in_child(void (*what)(void *), void *with);

/* hostile_requests.c */
void test_invalid_messages(void);
void test_invalid_commands(void);
void test_closed_socket(void);
void test_stopped_child(void);
void test_partial_sockets(void);
void request_as_user(void *with);
void test_users(void);
void flood_requests(void);
void flood_connections(void);

/* hostile_memory.c */
void test_moving_producers(void);
void test_kept_queues(void);
void test_corrupt_memory(void);

/* hostile_closes.c */
void test_slow_closes(void);
void test_full_launcher(void);

#endif
