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
#include "loopback.h"

#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>

#define WORKERS 2
#define FLOWS 64
#define WARM_UP_DATAGRAMS 100
#define LAST_COPY 600
/* In total longer than a thread waits without a look at the library's state. */
#define ROUNDS 25
#define ROUND_USECS 20000

static int server;
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS];

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (recv(server, &byte, 1, 0) == 1)
		received[nth]++;
	perror("recv");
	exit(1);
}

static void send_round(void)
{
	static int clients[FLOWS];

	for (int i = 0; i < FLOWS; i++) {
		if (!clients[i])
			clients[i] =
				socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
		sendto(clients[i], "x", 1, 0, (void *)&address,
		       sizeof(address));
	}
}

/* True when `want` datagrams have been received, within a second. */
static int wait_for(unsigned want)
{
	for (int i = 0; i < 10000; i++) {
		if (received[0] + received[1] >= want)
			return 1;
		usleep(100);
	}
	return 0;
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
	unsigned sent = 0;
	pthread_t thread;
	int status;

	if (argc < 2)
		return 2;
	is_closed_on_exec = !strcmp(argv[1], "move") ||
			    !strcmp(argv[1], "cloexec") ||
			    !strcmp(argv[1], "spawn");
	server =
		loopback_server(is_closed_on_exec ? SOCK_CLOEXEC : 0, &address);
	for (unsigned long i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker, (void *)i);
	while (received[0] < WARM_UP_DATAGRAMS ||
	       received[1] < WARM_UP_DATAGRAMS) {
		send_round();
		sent += FLOWS;
		if (!wait_for(sent)) {
			printf("nothing arrives\n");
			return 1;
		}
	}
	if (!strcmp(argv[1], "fresh")) {
		pthread_create(&thread, NULL, fresh_thread, &status);
		pthread_join(thread, NULL);
	} else {
		status = start(argv[1]);
	}
	for (int i = 0; i < ROUNDS; i++) {
		send_round();
		sent += FLOWS;
		usleep(ROUND_USECS);
	}
	wait_for(sent);
	printf("status: %d, missing: %u\n", status,
	       sent - received[0] - received[1]);
	return 0;
}
