/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server that is started with a filter that refuses close_range(2), as some
 * container runtimes do.
 *
 *	close_range_refused ERRNO some|full|lowered
 *
 * Two threads receive on a socket until it has lanes, if there are any. Then
 * close_range(2) fails with ERRNO and closes nothing, and closefrom(3) closes
 * all from FIRST on: some files, or all that the process may have open. Prints
 * what both did; the same with the library as without. With "lowered", the
 * process may have fewer files open than it has, and as many as FIRST remain:
 * the C library alone would end it.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#define FIRST 100
#define FILES_MAX 1024

static void *worker(void *nth)
{
	receive_all((unsigned)(unsigned long)nth);
	return NULL;
}

/* Refuses close_range(2) from now on, also in programs that are started. */
static void refuse(int error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close_range, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(*code), code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0))
		exit(2);
}

static void limit_files(rlim_t max)
{
	struct rlimit files;

	getrlimit(RLIMIT_NOFILE, &files);
	files.rlim_cur = max;
	if (setrlimit(RLIMIT_NOFILE, &files))
		exit(3);
}

/* The program's descriptors from FIRST on. */
static int count_open(void)
{
	int count = 0;

	for (int fd = FIRST; fd < FILES_MAX; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static void open_files(int full)
{
	int udp = socket(AF_INET, SOCK_DGRAM, 0);

	/* More than one call lists, below and above hidden numbers. */
	for (int fd = FIRST; fd < FIRST + 300; fd++)
		dup2(0, fd);
	dup2(udp, FIRST + 300);
	dup2(0, FILES_MAX - 1);
	while (full && dup(0) >= 0)
		;
}

int main(int argc, char **argv)
{
	int full, result, rounds;

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(300);
	if (argc == 3) {
		limit_files(FILES_MAX);
		refuse(atoi(argv[1]));
		execl(argv[0], argv[0], argv[1], argv[2], "filtered", NULL);
	}
	if (argc != 4)
		return 1;
	full = strcmp(argv[2], "some") != 0;
	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();

	open_files(full);
	if (!strcmp(argv[2], "lowered"))
		limit_files(FIRST);
	result = close_range(3, ~0U, 0);
	printf("close_range: %d, %s\n", result, strerrorname_np(errno));
	if (full)
		printf("full: %d\n", dup(0) < 0);
	else
		printf("open: %d\n", count_open());
	closefrom(FIRST);
	printf("after closefrom: %d\n", count_open());
	fflush(stdout);
	/* A sanitizer opens files as the program ends. */
	for (int fd = FIRST - 10; fd < FIRST; fd++)
		close(fd);

	/* All datagrams still arrive. */
	for (rounds = 0; rounds < 100; rounds++)
		send_all_and_wait('x');
	while (rounds-- > 0)
		send_all('e');
	for (int i = 0; i < WORKERS; i++)
		pthread_join(workers[i], NULL);
	return 0;
}
