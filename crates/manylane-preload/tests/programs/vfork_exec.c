/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 *	vfork_exec keep|close|copies|move|cloexec|spawn|fresh
 *
 * Two threads receive on a socket. A third one starts another program, which
 * gets the socket, by vfork. The child
 * keep: executes the program at once.
 * close: first closes all but the socket, as Python's subprocess does with
 *	pass_fds.
 * copies: as "close", and has copies of the socket on all numbers up to 600.
 * move: has a socket that is closed on exec, and gives the program a copy as
 *	its standard input.
 * cloexec: the same, by way of another copy that is closed on exec.
 * spawn: as "move", by posix_spawn.
 * fresh: as "keep". It is the first call of that thread that the library sees.
 *	Then it receives on a socket of its own, and prints its thread id.
 *
 * Prints how many datagrams that are sent after that are not received.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <fcntl.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>

#define LAST_COPY 600
/* In total longer than a thread waits without a look at the library's state. */
#define ROUNDS 25
#define ROUND_USECS 20000
/* Waits of at least 100 us, in all: a thread may get no CPU time for long. */
#define WAITS_MAX 400000

static void *worker(void *nth)
{
	receive_all((unsigned)(unsigned long)nth);
	return NULL;
}

static char *args[] = { "/bin/true", NULL }, *env[] = { NULL };

static __attribute__((noinline)) void child(const char *what)
{
	int last = server;

	if (!strcmp(what, "close") || !strcmp(what, "copies")) {
		close_range(3, server - 1, 0);
		close_range(server + 1, ~0U, 0);
	}
	if (!strcmp(what, "copies"))
		while (last < LAST_COPY)
			dup2(server, ++last);
	if (!strcmp(what, "move"))
		dup2(server, 0);
	if (!strcmp(what, "cloexec")) {
		dup3(server, LAST_COPY, O_CLOEXEC);
		dup2(LAST_COPY, 0);
	}
	execve(args[0], args, env);
	_exit(127);
}

/* Returns the status of the program. */
static __attribute__((noinline)) int start(const char *what)
{
	posix_spawn_file_actions_t actions;
	int status = -1;
	pid_t pid = -1;

	if (!strcmp(what, "spawn")) {
		posix_spawn_file_actions_init(&actions);
		posix_spawn_file_actions_adddup2(&actions, server, 0);
		posix_spawn(&pid, args[0], &actions, NULL, args, env);
		posix_spawn_file_actions_destroy(&actions);
	} else {
		pid = vfork();
		if (!pid)
			child(what);
	}
	waitpid(pid, &status, 0);
	return status;
}

static void *fresh_thread(void *status)
{
	struct sockaddr_in to;
	char byte;
	int own;

	*(int *)status = start("keep");
	own = loopback_server(SOCK_CLOEXEC, &to);
	for (int i = 0; i < WARM_UP_DATAGRAMS; i++) {
		sendto(own, "x", 1, 0, (void *)&to, sizeof(to));
		recv(own, &byte, 1, 0);
	}
	printf("%d\n", gettid());
	return NULL;
}

int main(int argc, char **argv)
{
	int is_closed_on_exec;
	pthread_t thread;
	unsigned sent, waits = 0;
	int status;

	if (argc < 2)
		return 2;
	is_closed_on_exec = !strcmp(argv[1], "move") ||
			    !strcmp(argv[1], "cloexec") ||
			    !strcmp(argv[1], "spawn");
	server =
		loopback_server(is_closed_on_exec ? SOCK_CLOEXEC : 0, &address);
	open_clients();
	for (int i = 0; i < FLOWS; i++)
		fcntl(clients[i], F_SETFD, FD_CLOEXEC);
	start_and_warm_up();
	if (!strcmp(argv[1], "fresh")) {
		pthread_create(&thread, NULL, fresh_thread, &status);
		pthread_join(thread, NULL);
	} else {
		status = start(argv[1]);
	}
	sent = total;
	for (int i = 0; i < ROUNDS; i++) {
		/* No more than a queue has room for. */
		while (sent - total > 4 * FLOWS && waits++ < WAITS_MAX)
			usleep(100);
		send_all('x');
		sent += FLOWS;
		usleep(ROUND_USECS);
	}
	while (total < sent && waits++ < WAITS_MAX)
		usleep(100);
	printf("status: %d, missing: %u\n", status, sent - total);
	return 0;
}
