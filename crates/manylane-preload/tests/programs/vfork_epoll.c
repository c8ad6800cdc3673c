/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 *	vfork_epoll seccomp|nested
 *
 * Two threads wait for one socket, each on an epoll instance of its own, until
 * both have received often. Then they park where the library does not see it,
 * and the main thread starts another program, which gets the socket, by vfork.
 * After that the main thread
 * seccomp: installs a filter.
 * nested: polls the instances, after a receive.
 *
 * Prints how many instances are readable before and after datagrams are sent.
 */
#define _GNU_SOURCE
#include "parked_epolls.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

/* Nothing waits for as long: what is readable was sent before. */
#define TIMEOUT_MS 50000

static __attribute__((noinline)) void start_program(void)
{
	static char *args[] = { "/bin/true", NULL }, *env[] = { NULL };
	pid_t pid = vfork();

	if (!pid) {
		execve(args[0], args, env);
		_exit(127);
	}
	waitpid(pid, NULL, 0);
}

/* A filter that allows all calls. */
static void install_filter(void)
{
	struct sock_filter code = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { 1, &code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0))
		perror("filter");
}

static void drain(void)
{
	char byte;

	while (recv(server, &byte, 1, MSG_DONTWAIT) == 1)
		;
}

/* The instances that are readable within `timeout` ms. */
static int count_readable(int is_nested, int timeout)
{
	struct epoll_event event;
	int count = 0;

	for (int i = 0; i < WORKERS; i++) {
		struct pollfd at = { .fd = instances[i], .events = POLLIN };

		count += is_nested ?
				 poll(&at, 1, timeout) :
				 epoll_wait(instances[i], &event, 1, timeout);
	}
	return count;
}

int main(int argc, char **argv)
{
	int is_nested, before;

	if (argc != 2)
		return 2;
	is_nested = !strcmp(argv[1], "nested");
	warm_up_and_park();
	wait_for_delivery();
	start_program();
	if (!is_nested)
		install_filter();
	drain();
	before = count_readable(is_nested, 0);
	send_all('x');
	printf("before: %d, after: %d\n", before,
	       count_readable(is_nested, TIMEOUT_MS));
	return 0;
}
