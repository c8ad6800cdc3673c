/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A thread receives alone for a while, and then with others:
 *
 *	sole_receiver MODE
 *
 * block, poll, select, epoll, messages: two more threads start, one after the
 * other. successor: the thread ends, and three others start. fork: the main
 * thread receives, and forks two processes that receive, too. reuse: the main
 * thread closes the socket, and receives on another one with the same number
 * with two threads. two-fds: the main thread alternates between two descriptors.
 * signal: the thread is interrupted while it waits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 16
#define RECEIVERS_MAX 8
#define RECEIVERS 3
/* Datagrams after which the library has seen a thread return. */
#define WARM_UP_DATAGRAMS 40

struct state {
	_Atomic unsigned received[RECEIVERS_MAX], total, ended, interrupted;
	_Atomic int complete; /* all receivers run */
};

static struct state *state;
static const char *mode;
static int server, clients[FLOWS];
/* The first of two sockets: its client ends after a sole receiver. */
static int is_first;
static struct sockaddr_in address;

static int is_mode(const char *what)
{
	return !strcmp(mode, what);
}

static void open_server(void)
{
	struct sockaddr_in fresh;

	server = loopback_server(0, &fresh);
	address = fresh;
}

/* Waits according to the mode; returns the flags of the receive after it. */
static int wait_for(int fd, int epoll)
{
	struct pollfd at = { .fd = fd, .events = POLLIN };
	struct epoll_event event;
	fd_set set;

	if (is_mode("poll")) {
		poll(&at, 1, -1);
	} else if (is_mode("epoll")) {
		epoll_wait(epoll, &event, 1, -1);
	} else if (is_mode("select")) {
		FD_ZERO(&set);
		FD_SET(fd, &set);
		select(fd + 1, &set, NULL, NULL, NULL);
	} else {
		return 0;
	}
	return MSG_DONTWAIT;
}

static ssize_t receive(int fd, char *data, size_t len, int flags)
{
	struct iovec part = { data, len };
	struct mmsghdr message = { .msg_hdr = { .msg_iov = &part,
						.msg_iovlen = 1 } };

	if (!is_mode("messages"))
		return recv(fd, data, len, flags);
	if (recvmmsg(fd, &message, 1, flags | MSG_WAITFORONE, NULL) != 1)
		return -1;
	return message.msg_len;
}

/* Receives until a stop message, or until `limit` datagrams. */
static void serve(unsigned nth, unsigned limit)
{
	struct epoll_event event = { .events = EPOLLIN };
	int fds[2] = { server, dup(server) }, next_fd = 0;
	int epoll = epoll_create1(EPOLL_CLOEXEC);

	if (epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event))
		perror("epoll_ctl");
	while (!limit || state->received[nth] < limit) {
		char data[64];
		int fd = fds[is_mode("two-fds") ? next_fd++ % 2 : 0];
		int flags = wait_for(fd, epoll);

		if (receive(fd, data, sizeof(data), flags) < 0) {
			if (errno == EINTR)
				state->interrupted++;
			else if (errno != EAGAIN)
				perror("receive");
			continue;
		}
		if (data[0] == 'S') {
			state->ended++;
			break;
		}
		state->received[nth]++;
		state->total++;
	}
	close(fds[1]);
	close(epoll);
}

static void *receive_until_stop(void *nth)
{
	serve((unsigned)(unsigned long)nth, 0);
	return NULL;
}

static void *receive_some(void *nth)
{
	serve((unsigned)(unsigned long)nth, WARM_UP_DATAGRAMS);
	return NULL;
}

static void wait_until_warm(unsigned nth)
{
	while (state->received[nth] < WARM_UP_DATAGRAMS)
		usleep(100);
}

/* Sends bursts; each is received completely before the next one. */
static void *client(void *arg)
{
	unsigned rounds, i, all = 0;

	for (rounds = 0; rounds < 200 || all < RECEIVERS; rounds++) {
		unsigned want = state->total + FLOWS;

		for (i = 0; i < FLOWS; i++)
			if (sendto(clients[i], "x", 1, 0, (void *)&address,
				   sizeof(address)) != 1)
				perror("sendto");
		while (state->total < want)
			usleep(50);
		if (is_first && want >= 10 * WARM_UP_DATAGRAMS)
			break;
		for (i = all = 0; state->complete && i < RECEIVERS; i++)
			all += state->received[i] >= 2 * WARM_UP_DATAGRAMS;
	}
	while (state->complete && state->ended < RECEIVERS) {
		sendto(clients[rounds++ % FLOWS], "S", 1, 0, (void *)&address,
		       sizeof(address));
		usleep(200);
	}
	return arg;
}

static void ignore_signal(int signal)
{
	(void)signal;
}

int main(int argc, char **argv)
{
	pthread_t threads[RECEIVERS], sender;
	unsigned long first = 1, i;
	pid_t self = getpid();

	if (argc != 2)
		return 2;
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	mode = argv[1];
	state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	open_server();
	is_first = is_mode("reuse");
	pthread_create(&sender, NULL, client, NULL);
	if (is_mode("successor")) {
		pthread_create(&threads[0], NULL, receive_some, (void *)7);
		pthread_join(threads[0], NULL);
		first = 0;
	} else if (is_mode("fork") || is_mode("two-fds")) {
		serve(0, WARM_UP_DATAGRAMS);
	} else if (is_mode("reuse")) {
		int before = server;

		serve(0, 10 * WARM_UP_DATAGRAMS);
		pthread_join(sender, NULL);
		is_first = 0;
		close(server);
		open_server();
		printf("the same number: %s\n",
		       server == before ? "yes" : "no");
		pthread_create(&sender, NULL, client, NULL);
	} else {
		pthread_create(&threads[0], NULL, receive_until_stop,
			       (void *)0);
		wait_until_warm(0);
	}
	if (is_mode("signal")) {
		struct sigaction action = { .sa_handler = ignore_signal };

		sigaction(SIGUSR1, &action, NULL);
		while (!state->interrupted) {
			pthread_kill(threads[0], SIGUSR1);
			usleep(1000);
		}
	}
	for (i = first; i < RECEIVERS; i++) {
		if (!is_mode("fork")) {
			pthread_create(&threads[i], NULL, receive_until_stop,
				       (void *)i);
			if (is_mode("reuse") || is_mode("two-fds"))
				continue;
			wait_until_warm(i);
		} else if (fork() == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() == self)
				serve(i, 0);
			_exit(0);
		}
	}
	state->complete = 1;
	if (is_mode("fork") || is_mode("reuse") || is_mode("two-fds")) {
		serve(0, 0);
	} else {
		pthread_join(threads[0], NULL);
	}
	pthread_join(sender, NULL);
	for (i = 1; i < RECEIVERS; i++) {
		if (is_mode("fork"))
			wait(NULL);
		else
			pthread_join(threads[i], NULL);
	}
	printf("interrupted: %s\n", state->interrupted ? "yes" : "no");
	close(server);
	return 0;
}
