/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Answers each datagram with its payload and a "!": server PORT HOW RECEIVERS
 * [ADDRESS [MICROSECONDS]]. Receivers share one socket. The work for an answer
 * takes 200 us by default. Ends at SIGTERM with 0.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int fd, work = 200;
static const char *how;

/* Serves one datagram; 0 if there is none. */
static int serve(void)
{
	char buffer[2048];
	struct sockaddr_in peer;
	socklen_t len = sizeof(peer);
	ssize_t got = recvfrom(fd, buffer, sizeof(buffer) - 1, 0, (void *)&peer,
			       &len);

	if (got < 0) {
		if (errno != EAGAIN && errno != EINTR)
			err(1, "recvfrom");
		return 0;
	}
	/*
	 * Some work: meanwhile the others receive, so that each of them is seen
	 * to receive.
	 */
	if (work)
		usleep(work);
	buffer[got] = '!';
	if (sendto(fd, buffer, got + 1, 0, (void *)&peer, len) != got + 1)
		err(1, "sendto");
	return 1;
}

static void wait_by_epoll(int epoll)
{
	struct epoll_event event;

	if (epoll_wait(epoll, &event, 1, -1) < 0 && errno != EINTR)
		err(1, "epoll_wait");
}

static void *receive(void *unused)
{
	int epoll = -1;

	(void)unused;
	if (!strcmp(how, "epoll")) {
		struct epoll_event event = { .events = EPOLLIN };

		epoll = epoll_create1(EPOLL_CLOEXEC);
		if (epoll < 0 ||
		    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
			err(1, "epoll");
	}
	for (;;) {
		if (!strcmp(how, "poll")) {
			struct pollfd one = { .fd = fd, .events = POLLIN };

			poll(&one, 1, -1);
		} else if (!strcmp(how, "select")) {
			fd_set set;

			FD_ZERO(&set);
			FD_SET(fd, &set);
			select(fd + 1, &set, NULL, NULL, NULL);
		} else if (epoll >= 0) {
			wait_by_epoll(epoll);
		}
		while (serve())
			;
	}
	return NULL;
}

static void end(int signal)
{
	(void)signal;
	_exit(0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in addr = { .sin_family = AF_INET,
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int receivers;
	sigset_t set;

	if (argc < 4 || argc > 6)
		errx(2,
		     "usage: server PORT HOW RECEIVERS [ADDRESS [MICROSECONDS]]");
	if (argc > 5)
		work = atoi(argv[5]);
	if (argc > 4 && inet_aton(argv[4], &addr.sin_addr) != 1)
		errx(2, "no address: %s", argv[4]);
	addr.sin_port = htons(atoi(argv[1]));
	how = argv[2];
	receivers = atoi(argv[3]);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (fd < 0 || bind(fd, (void *)&addr, sizeof(addr)) < 0)
		err(1, "bind");
	if (!strcmp(how, "poll") || !strcmp(how, "select") ||
	    !strcmp(how, "epoll"))
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
	/*
	 * Threads inherit it, so that this one gets the signal; children undo
	 * it.
	 */
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigprocmask(SIG_BLOCK, &set, NULL);
	for (int i = 0; i < receivers; i++) {
		pthread_t thread;

		if (strcmp(how, "fork")) {
			if (pthread_create(&thread, NULL, receive, NULL))
				errx(1, "pthread_create");
		} else if (!fork()) {
			signal(SIGTERM, end);
			sigprocmask(SIG_UNBLOCK, &set, NULL);
			receive(NULL);
		}
	}
	sigwait(&set, &(int){ 0 });
	if (!strcmp(how, "fork")) {
		signal(SIGTERM, SIG_IGN);
		kill(0, SIGTERM);
		while (wait(NULL) > 0)
			;
	}
	return 0;
}
