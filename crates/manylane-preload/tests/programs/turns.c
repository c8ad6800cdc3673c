/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Something happens to a socket that three threads receive on:
 *
 *	turns WHAT
 *
 * Prints how many datagrams came before and after it, which are all that were
 * sent.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define FLOWS 16
#define WORKERS 3

extern char **environ;

static int server, clients[FLOWS];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], total, answered;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		char data[64];
		struct sockaddr_in from;
		struct iovec part = { data, sizeof(data) };
		struct msghdr message = { .msg_name = &from,
					  .msg_namelen = sizeof(from),
					  .msg_iov = &part,
					  .msg_iovlen = 1 };

		if (recvmsg(server, &message, 0) < 0) {
			perror("worker");
			exit(1);
		}
		if (data[0] == 'S')
			return NULL;
		if (sendmsg(server, &message, 0) > 0)
			answered++;
		received[nth]++;
		total++;
	}
}

static void burst(void)
{
	unsigned want = total + FLOWS;
	int i;

	for (i = 0; i < FLOWS; i++)
		if (sendto(clients[i], "x", 1, 0, (void *)&address,
			   sizeof(address)) != 1)
			perror("sendto");
	while (total < want)
		usleep(50);
}

static void handler(int signal)
{
	(void)signal;
}

static void broadcast(void)
{
	struct sockaddr_in all = address;
	int one = 1, i;
	unsigned want = total + 5;

	all.sin_addr.s_addr = htonl(0x7fffffff);
	setsockopt(clients[0], SOL_SOCKET, SO_BROADCAST, &one, sizeof(one));
	for (i = 0; i < 5; i++)
		if (sendto(clients[0], "x", 1, 0, (void *)&all, sizeof(all)) !=
		    1)
			perror("broadcast");
	while (total < want)
		usleep(50);
	/* A copy too many would show by then. */
	burst();
	printf("broadcasts %u\n", total - want - FLOWS + 5);
}

static void pass_on(void)
{
	int pair[2], got;
	char byte = 0;
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr header;
	} control = { .header = { .cmsg_len = CMSG_LEN(sizeof(int)),
				  .cmsg_level = SOL_SOCKET,
				  .cmsg_type = SCM_RIGHTS } };
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part,
				  .msg_iovlen = 1,
				  .msg_control = &control,
				  .msg_controllen = sizeof(control.room) };

	memcpy(CMSG_DATA(&control.header), &server, sizeof(int));
	socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
	printf("passed on: %zd\n", sendmsg(pair[0], &message, 0));
	printf("taken: %zd\n", recvmsg(pair[1], &message, 0));
	memcpy(&got, CMSG_DATA(&control.header), sizeof(int));
	close(got);
	close(pair[0]);
	close(pair[1]);
}

static void start(void)
{
	char *args[] = { "true", NULL };
	pid_t pid;
	int status = -1;

	if (posix_spawnp(&pid, "true", NULL, NULL, args, environ) == 0)
		waitpid(pid, &status, 0);
	printf("started: %d\n", status);
}

static void turn(const char *what)
{
	struct sigaction action = { .sa_handler = handler };
	struct ip_mreq group = { .imr_multiaddr.s_addr = htonl(0xef010203),
				 .imr_interface.s_addr =
					 htonl(INADDR_LOOPBACK) };
	int one = 1, inner;
	struct epoll_event event = { .events = EPOLLIN };

	if (!strcmp(what, "broadcast")) {
		broadcast();
	} else if (!strcmp(what, "passed")) {
		pass_on();
	} else if (!strcmp(what, "exec")) {
		start();
	} else if (!strcmp(what, "signals")) {
		sigaction(SIGUSR1, &action, NULL);
		signal(SIGUSR2, handler);
	} else if (!strcmp(what, "multicast")) {
		printf("joined: %d\n",
		       setsockopt(server, SOL_IP, IP_ADD_MEMBERSHIP, &group,
				  sizeof(group)));
	} else if (!strcmp(what, "option")) {
		printf("option: %d\n",
		       setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &one,
				  sizeof(one)));
	} else if (!strcmp(what, "reuseport")) {
		printf("option: %d\n",
		       setsockopt(server, SOL_SOCKET, SO_REUSEPORT, &one,
				  sizeof(one)));
	} else if (!strcmp(what, "nested-epoll")) {
		inner = epoll_create1(0);
		epoll_ctl(inner, EPOLL_CTL_ADD, server, &event);
		printf("nested: %d\n", epoll_ctl(epoll_create1(0),
						 EPOLL_CTL_ADD, inner, &event));
	} else if (!strcmp(what, "user")) {
		printf("user: %d\n", setuid(65534));
		/* Another user is not killed with the parent by an old wish. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	} else if (!strcmp(what, "fork")) {
		pid_t pid = fork();

		if (pid == 0)
			_exit(0);
		waitpid(pid, NULL, 0);
	}
}

int main(int argc, char **argv)
{
	pthread_t threads[WORKERS];
	socklen_t len = sizeof(address);
	int i, before;

	if (argc < 2)
		return 2;
	/* Nobody outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	server = socket(AF_INET, SOCK_DGRAM, 0);
	address.sin_family = AF_INET;
	if (bind(server, (void *)&address, sizeof(address)) ||
	    getsockname(server, (void *)&address, &len))
		return 1;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	/* Before anybody receives, for what is to be there from the start. */
	if (argc > 2)
		turn(argv[1]);
	for (i = 0; i < WORKERS; i++)
		pthread_create(&threads[i], NULL, worker,
			       (void *)(unsigned long)i);
	for (before = 0;
	     before < 100 || !received[0] || !received[1] || !received[2];
	     before++)
		burst();
	if (argc == 2)
		turn(argv[1]);
	for (i = 0; i < 100; i++)
		burst();
	printf("unanswered %u\n", total - answered);
	for (i = 0; i < WORKERS; i++)
		if (!strcmp(argv[1], "cancel"))
			pthread_cancel(threads[i]);
	for (i = 0; i < WORKERS; i++)
		sendto(clients[i], "S", 1, 0, (void *)&address,
		       sizeof(address));
	for (i = 0; i < WORKERS; i++)
		pthread_join(threads[i], NULL);
	close(server);
	return 0;
}
