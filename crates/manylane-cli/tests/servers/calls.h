/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the parts of the program `calls` share: calls.c has the scene, seen.c
 * what single calls see, and what is there after a fall; lives.c sockets that
 * come and go, signals, and threads.
 */
#ifndef CALLS_H
#define CALLS_H

#define _GNU_SOURCE
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>

/* Datagrams that wait at a time. */
#define MANY 100

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
/* A socket that no library knows of, in a namespace. */
int hidden(int namespace, int family, int type, int protocol);
socklen_t address(union address *at, const char *ip, int port);

/* Sends by a client. */
void put(int client, const void *data, size_t len);
/* All that was sent is where it waits. */
void arrive(void);
size_t length(int n);
/* Datagram number n, from the two clients in turn. */
void put_number(int n);
/* Whether this is datagram number n. */
int is_number(int n, const char *data, ssize_t len);
int from_client(const union address *from, int client);
/* Receives numbers from `first` to before `end`: how many were as sent. */
int take_numbers(int fd, int first, int end);
int is_empty(int fd);

/* A server at `ip`, which is asked at `ask`, and clients for it. */
void open_at(const char *ip, const char *ask, int port);
/* Receives until a receiver that comes back has its queues. */
void warm_up(void);
void leave(void);
/* Says the name, opens the server and warms it up. */
void begin(const char *name, int port);
/* So many numbers wait. */
void fill(void);
/* The socket is plain now: what waited comes first, then what came after. */
void fallen(void);

/* seen.c */
void falls(void);
void calls(void);

/* lives.c */
void closes(void);
void reopened(int port);
void killed(int port);
void thread_ended(int port);
void threads(void);
void interrupted(int port);
void restarted(int port);
void small_stack(int port);

#endif /* CALLS_H */
