/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The parts of the program `calls`: calls.c has the set-up, call_results.c the results
 * of single calls, and the queue after a fallback; socket_lifetime.c sockets that are
 * opened and closed, signals, and threads; epoll_entries.c instances of epoll.
 */
#ifndef CALLS_H
#define CALLS_H

#define _GNU_SOURCE
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>

/* Queued datagrams. */
#define QUEUED_DATAGRAMS 100

#define CHECK(cond) printf("  %s: %s\n", #cond, (cond) ? "yes" : "no")

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

extern const char *ip4, *ip6;
extern int there, server, clients[2];
extern in_port_t ports[2];
extern union address to;
extern socklen_t to_len;

/* Ends the program. */
void fail(const char *what);
/* Opens a socket that no library knows of, in a namespace. */
int open_hidden_socket(int namespace, int family, int type, int protocol);
socklen_t address(union address *at, const char *ip, int port);

/* Sends by a client. */
void send_by_client(int client, const void *data, size_t len);
/* Waits until all that was sent is queued. */
void wait_for_arrival(void);
size_t length(int n);
/* Sends datagram number n, from the two clients in turn. */
void send_number(int n);
/* True if this is datagram number n. */
int is_number(int n, const char *data, ssize_t len);
int from_client(const union address *from, int client);
/*
 * Receives numbers from `first` to before `end`; returns how many were correct.
 */
int receive_numbers(int fd, int first, int end);
int is_empty(int fd);

/* Opens a server at `ip`, whose clients send to `ask`, and its clients. */
void open_server(const char *ip, const char *ask, int port);
/* Receives until a receiver that returns has its queues. */
void warm_up(void);
void close_server(void);
/* Prints the name, opens the server and warms it up. */
void begin_test(const char *name, int port);
/* Sends all numbers. */
void send_all_numbers(void);
/*
 * Checks a socket that is plain now: datagrams from before come first, then
 * later ones.
 */
void check_plain(void);

/* call_results.c */
void test_fallbacks(void);
void calls(void);

/* socket_lifetime.c */
void test_closes(void);
void test_reopened(int port);
void test_killed(int port);
void test_thread_end(int port);
void test_threads(void);
void test_interrupts(int port);
void test_restarts(int port);
void test_small_stack(int port);

/* epoll_entries.c */
void test_epoll_entries(int port);

#endif /* CALLS_H */
