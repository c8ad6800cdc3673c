/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a fork does to its process: descriptors that are reserved ahead of it,
 * and its use of the heap and the file system.
 *
 *	fork_resources open LIMIT SOCKETS	prints how many files a child can open, with
 *					a limit of descriptors
 *	fork_resources full	the same limit, and two threads receive on one socket
 *	fork_resources fork	prints what fork(2) and seteuid(2) allocated and opened
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loopback.h"

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);

static volatile int counting;
static volatile unsigned allocated, opened;

void *malloc(size_t size)
{
	allocated += counting;
	return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
	allocated += counting;
	return __libc_calloc(count, size);
}

static int open_any(const char *path, int flags)
{
	opened += counting;
	return syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}

int open(const char *path, int flags, ...)
{
	return open_any(path, flags);
}

int open64(const char *path, int flags, ...)
{
	return open_any(path, flags);
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static int sockets[1024];
static struct sockaddr_in addresses[1024];

static void set_fd_limit(rlim_t limit, unsigned count)
{
	struct rlimit to = { limit, limit };
	unsigned i;

	if (setrlimit(RLIMIT_NOFILE, &to))
		fail("setrlimit");
	for (i = 0; i < count; i++)
		sockets[i] = loopback_server(0, &addresses[i]);
}

/* Counts the files that a child can open. */
static unsigned count_openable(void)
{
	int ends[2];
	unsigned count = 0;
	pid_t child;

	if (pipe(ends))
		fail("pipe");
	child = fork();
	if (child < 0)
		fail("fork");
	if (!child) {
		while (open("/dev/null", O_RDONLY) >= 0)
			count++;
		if (write(ends[1], &count, sizeof(count)) != sizeof(count))
			fail("write");
		_exit(0);
	}
	if (read(ends[0], &count, sizeof(count)) != sizeof(count))
		fail("read");
	waitpid(child, NULL, 0);
	close(ends[0]);
	close(ends[1]);
	return count;
}

static volatile unsigned received[2];

static void *receive(void *nth)
{
	volatile unsigned *mine = &received[(long)nth];
	char byte;

	while (recv(sockets[0], &byte, 1, 0) == 1 && byte != 'q')
		++*mine;
	return NULL;
}

/* Two threads receive until the library would give them lanes. */
static void run_two_receivers(void)
{
	int sender = socket(AF_INET, SOCK_DGRAM, 0);
	pthread_t threads[2];
	unsigned left = 100000, sent = 0;
	long i;

	for (i = 0; i < 2; i++)
		pthread_create(&threads[i], NULL, receive, (void *)i);
	while ((received[0] < 8 || received[1] < 8) && left--) {
		/* The queue has room for these, and for those that follow. */
		if (sent - received[0] - received[1] < 64) {
			sendto(sender, "x", 1, 0, (void *)addresses,
			       sizeof(*addresses));
			sent++;
		}
		poll(NULL, 0, 1);
	}
	printf("both: %s\n", received[0] < 8 || received[1] < 8 ? "no" : "yes");
	for (i = 0; i < 2; i++)
		sendto(sender, "q", 1, 0, (void *)addresses,
		       sizeof(*addresses));
	for (i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "open")) {
		set_fd_limit(strtoul(argv[2], NULL, 10),
			     strtoul(argv[3], NULL, 10));
		printf("%u\n", count_openable());
		return 0;
	}
	if (argc == 2 && !strcmp(argv[1], "full")) {
		set_fd_limit(64, 16);
		count_openable();
		run_two_receivers();
		return 0;
	}
	if (argc == 2 && !strcmp(argv[1], "fork")) {
		pid_t child;

		sockets[0] = loopback_server(0, addresses);
		counting = 1;
		if (seteuid(geteuid()))
			fail("seteuid");
		child = fork();
		counting = 0;
		if (!child)
			_exit(allocated + opened ? 1 : 0);
		waitpid(child, NULL, 0);
		printf("heap %u, files %u\n", allocated, opened);
		return 0;
	}
	fprintf(stderr, "fork_resources open LIMIT SOCKETS, full, fork\n");
	return 2;
}
