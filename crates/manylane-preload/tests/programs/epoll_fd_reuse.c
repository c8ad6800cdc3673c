/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Descriptors are closed, and their numbers reused, at the moment at which the
 * library makes an epoll instance watch them:
 *
 *	epoll_fd_reuse socket|instance|exec|number
 *
 * Three threads with an epoll instance each receive on one socket, by copies of
 * its descriptor, until the library has seen each return often. Then the socket
 * becomes plain, and another thread closes a copy (or an instance) and opens
 * something with its number. Events of the instances must be of the socket.
 * exec: the socket becomes plain because a started program would inherit a
 * copy; that copy is closed, and the kernel has to see a plain socket all the
 * same. number: the program puts its own socket at the number at which the
 * library, if loaded, has a copy of the server's socket at that moment.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 16
#define WORKERS 3

static int server, clients[FLOWS], epolls[WORKERS], added[WORKERS];
static int instance, is_number_case, exec_copy = -1, pair[2];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], total, stop, wanted;
static _Atomic int victim, closed, other;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	while (!stop) {
		struct epoll_event event;
		char byte;

		epoll_wait(epolls[nth], &event, 1, 50);
		while (recv(server, &byte, 1, MSG_DONTWAIT) == 1) {
			received[nth]++;
			total++;
		}
	}
	return NULL;
}

/* Returns the kernel's cookie of a socket. Bypasses the library. */
static unsigned long long cookie(int fd)
{
	unsigned long long value = 0;
	socklen_t len = sizeof(value);

	syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_COOKIE, &value, &len);
	return value;
}

/*
 * Finds a number at which the library has the server's socket; any free number
 * if there is none.
 */
static int number_of_copy(void)
{
	int fd;

	for (fd = 64; fd < 8192; fd++)
		if (cookie(fd) == cookie(server))
			return fd;
	return 3000;
}

/* Closes a descriptor and opens something readable with its number. */
static void *close_and_reuse(void *unused)
{
	int fd;

	while (!wanted)
		usleep(100);
	fd = victim;
	if (is_number_case) {
		fd = number_of_copy();
		other = dup2(pair[0], fd);
		closed = 1;
		return unused;
	}
	close(fd);
	if (instance) {
		struct epoll_event event = { .events = EPOLLIN };

		other = epoll_create1(EPOLL_CLOEXEC);
		epoll_ctl(other, EPOLL_CTL_ADD, dup(added[0]), &event);
	} else if (exec_copy >= 0) {
		other = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	} else {
		other = eventfd(1, 0);
	}
	closed = 1;
	if (other != fd)
		fprintf(stderr, "%d, not %d\n", other, fd);
	return unused;
}

static void wait_until_closed(int tries)
{
	while (!closed && tries--)
		usleep(1000);
}

/* The next descriptor that the library looks up in its table is the victim. */
static void before_epoll_ctl(int epfd, int op, int fd)
{
	static _Atomic int once;

	if (op != EPOLL_CTL_ADD || wanted)
		return;
	for (int i = 0; i < WORKERS; i++) {
		if (fd != added[i] || epfd != epolls[i] || once++)
			continue;
		victim = instance ? epfd : fd;
		wanted = 1;
		/*
		 * With a bound, because the library may wait for this thread.
		 */
		wait_until_closed(100);
	}
}

static void before_setsockopt(int fd, int level, int name)
{
	(void)fd;
	if (level != SOL_SOCKET || name != SO_ATTACH_REUSEPORT_CBPF || wanted)
		return;
	victim = exec_copy;
	wanted = 1;
	wait_until_closed(100);
}

/* Starts a program while a copy is open that it would inherit. */
static void start_program(void)
{
	char *words[] = { "true", NULL }, *nothing[] = { NULL };
	pid_t pid;

	exec_copy = dup(server);
	if (posix_spawn(&pid, "/bin/true", NULL, NULL, words, nothing) ||
	    waitpid(pid, NULL, 0) != pid)
		perror("posix_spawn");
}

static void send_some(int count)
{
	static unsigned flow;

	while (count--)
		if (sendto(clients[flow++ % FLOWS], "x", 1, 0, (void *)&address,
			   sizeof(address)) != 1)
			perror("sendto");
}

int main(int argc, char **argv)
{
	void (**hook)(int, int, int) = (void (**)(int, int, int))dlsym(
		RTLD_DEFAULT, "race_before_epoll_ctl");
	void (**option_hook)(int, int, int) = (void (**)(int, int, int))dlsym(
		RTLD_DEFAULT, "race_before_setsockopt");
	struct epoll_event event = { .events = EPOLLIN };
	socklen_t len;
	pthread_t threads[WORKERS], thread;
	int i, one = 1, wrong_events = 0, is_exec, shares = -1;
	unsigned want, round;

	instance = argc > 1 && !strcmp(argv[1], "instance");
	is_exec = argc > 1 && !strcmp(argv[1], "exec");
	is_number_case = argc > 1 && !strcmp(argv[1], "number");
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		perror("socketpair");
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	server = loopback_server(SOCK_CLOEXEC, &address);
	for (i = 0; i < WORKERS; i++) {
		epolls[i] = epoll_create1(EPOLL_CLOEXEC);
		added[i] = fcntl(server, F_DUPFD_CLOEXEC, 0);
		epoll_ctl(epolls[i], EPOLL_CTL_ADD, added[i], &event);
		pthread_create(&threads[i], NULL, worker,
			       (void *)(unsigned long)i);
	}
	pthread_create(&thread, NULL, close_and_reuse, NULL);
	for (round = 0;
	     round < 50 || !received[0] || !received[1] || !received[2];
	     round++) {
		want = total + FLOWS;
		send_some(FLOWS);
		while (total < want)
			usleep(50);
	}
	if (is_exec) {
		if (option_hook)
			*option_hook = before_setsockopt;
		start_program();
	} else {
		if (hook && !is_number_case)
			*hook = before_epoll_ctl;
		if (option_hook && is_number_case)
			*option_hook = before_setsockopt;
		if (setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &one,
			       sizeof(one)))
			perror("setsockopt");
	}
	/*
	 * Instances whose threads sleep have been moved by them; this one moves
	 * here.
	 */
	if (!wanted) {
		victim = is_exec ? exec_copy : instance ? epolls[0] : added[0];
		wanted = 1;
	}
	pthread_join(thread, NULL);
	if (is_number_case) {
		struct timeval time = { 9, 9 };

		len = sizeof(time);
		printf("its own socket: %d\n",
		       cookie(other) == cookie(pair[0]));
		syscall(SYS_getsockopt, pair[0], SOL_SOCKET, SO_RCVTIMEO, &time,
			&len);
		printf("waits for ever: %d\n", !time.tv_sec && !time.tv_usec);
		close(other);
	}
	want = total + FLOWS;
	for (i = 0; i < FLOWS; i++)
		send_some(1);
	while (total < want)
		usleep(50);
	stop = 1;
	for (i = 0; i < WORKERS; i++)
		pthread_join(threads[i], NULL);
	for (i = 0; i < WORKERS; i++)
		wrong_events += epoll_wait(epolls[i], &event, 1, 0) > 0;
	pin_to_this_cpu();
	send_some(1);
	wait_for_delivery();
	for (i = 0; i < WORKERS; i++) {
		struct epoll_event all[4];

		/* Once each; a new instance contains its own copy. */
		printf("instance %d: %d\n", i,
		       epoll_wait(epolls[i], all, 4, 0));
	}
	/* Bypasses the library. */
	len = sizeof(shares);
	syscall(SYS_getsockopt, server, SOL_SOCKET, SO_REUSEPORT, &shares,
		&len);
	printf("shares its port: %d\n", shares);
	printf("%d events of another file\n", wrong_events);
	return 0;
}
