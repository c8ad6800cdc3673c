/* SPDX-License-Identifier: GPL-2.0-only */
/* What the tests of the module share. A test is a function; it ends by exit(1) when it fails. */
#ifndef MANYLANE_TEST_H
#define MANYLANE_TEST_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../manylane_ioctl.h"

struct test {
	const char *name;
	void (*run)(void);
};

/* Each file's own, ended by one without a name. */
extern const struct test queue_tests[], call_tests[], message_tests[],
	header_tests[], fault_tests[];

void stress(unsigned int seconds, unsigned int seed);

#define fail(...)                                          \
	do {                                               \
		printf("%s:%d: ", __FILE__, __LINE__);     \
		printf(__VA_ARGS__);                       \
		printf(" (errno: %s)\n", strerror(errno)); \
		fflush(stdout);                            \
		_exit(1);                                  \
	} while (0)

/* The kernel lacks what the test needs. */
#define skip(...)                    \
	do {                         \
		printf("skipped: "); \
		printf(__VA_ARGS__); \
		printf("\n");        \
		fflush(stdout);      \
		_exit(77);           \
	} while (0)

/* Evaluates each once; integers. */
#define is(found, expected)                                               \
	do {                                                              \
		long long found_ = (found), expected_ = (expected);       \
		if (found_ != expected_)                                  \
			fail("%s is %lld, expected %lld", #found, found_, \
			     expected_);                                  \
	} while (0)

/* The call fails with that error. */
#define refused(call, error)                                            \
	do {                                                            \
		errno = 0;                                              \
		long long result_ = (call);                             \
		if (result_ != -1 || errno != (error))                  \
			fail("%s is %lld, expected %s", #call, result_, \
			     #error);                                   \
	} while (0)

#define QUEUES_MAX 16

struct counted {
	struct manylane_counts all;
	struct manylane_queue_counts queue[QUEUES_MAX];
	struct manylane_queue_counts sum;
};

/* A UDP socket bound to a port of its own on loopback; its address, if asked for. */
int bound(int family, struct sockaddr_storage *name);
/* A socket whose datagrams go to the bound one. */
int sender_to(int fd);
int attach(int fd, unsigned int policy, unsigned int queues);
/* bound() and attach() */
int attached(int family, unsigned int policy, unsigned int queues);
struct counted counts_of(int fd);
/* Until so many have arrived in queues, or been left to the socket's own. */
void await_arrived(int fd, uint64_t n);
/* Datagrams with the numbers from "first" on. */
void send_numbers(int from, uint32_t first, uint32_t n);
/* Receives until nothing is left; each number counts in "seen". Returns how many. */
uint32_t drain(int fd, unsigned char *seen, uint32_t seen_len);
void pin(int cpu);
int cpus(void);
double now(void);
/* A tenth on a debugging kernel, where a datagram takes milliseconds. */
uint32_t scaled(uint32_t n);

#endif
