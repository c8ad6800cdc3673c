/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Signals that arrive between two of the waits that one wait consists of:
 *
 *	signal_race CASE
 *
 * Two threads receive on a socket until the library has seen each return often.
 * Then one waits and nothing arrives. A library behind (inject_signal.c) sends it a
 * signal when a wait inside has ended: the second one or a later one, and with a
 * mask also the first one. The call has to end with EINTR. CASE: recv, poll,
 * select, epoll, mask (a ppoll that unblocks the signal). Or "option", "time": the
 * socket becomes plain while its options are read.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

#include "warm_up.h"

#define WAITS 12

static _Atomic unsigned handled, interrupted, hold, parked, all_sent, ended;
static const char *pattern;

static void handle(int signal)
{
	(void)signal;
	handled++;
}

static int get_option(int name, void (**between)(void), void (*then)(void))
{
	struct timeval value = { .tv_sec = -1 };
	socklen_t len = sizeof(value);

	*between = then;
	if (getsockopt(server, SOL_SOCKET, name, &value, &len))
		return -1;
	if (name == SO_REUSEPORT) {
		int number;

		memcpy(&number, &value, sizeof(number));
		return number;
	}
	return (int)value.tv_usec;
}

/* After this, no lanes are left. */
static void make_plain(void)
{
	int one = 1;
	char byte;

	setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &one, sizeof(one));
	while (recv(server, &byte, 1, MSG_DONTWAIT) > 0)
		;
}

static int wait_by_pattern(int epoll)
{
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct epoll_event event;
	sigset_t none;
	fd_set set;
	char byte;

	sigemptyset(&none);
	if (!strcmp(pattern, "poll"))
		return poll(&at, 1, -1);
	if (!strcmp(pattern, "mask"))
		return ppoll(&at, 1, NULL, &none);
	if (!strcmp(pattern, "select")) {
		FD_ZERO(&set);
		FD_SET(server, &set);
		return select(server + 1, &set, NULL, NULL, NULL);
	}
	if (!strcmp(pattern, "epoll"))
		return epoll_wait(epoll, &event, 1, -1);
	return recv(server, &byte, 1, 0);
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg, *after = NULL;
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(0), flags = MSG_DONTWAIT;
	sigset_t set;

	/* Found only if inject_signal.c is loaded. */
	after = dlsym(RTLD_DEFAULT, "signal_after_waits");
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	if (!strcmp(pattern, "recv") || !strcmp(pattern, "option") ||
	    !strcmp(pattern, "time"))
		flags = 0;
	if (!strcmp(pattern, "mask")) {
		sigemptyset(&set);
		sigaddset(&set, SIGUSR1);
		pthread_sigmask(SIG_BLOCK, &set, NULL);
	}
	for (;;) {
		char byte;

		if (flags && wait_by_pattern(epoll) < 0)
			continue;
		if (recv(server, &byte, 1, flags) < 1)
			continue;
		count_received(nth);
		if (hold)
			break;
	}
	parked++;
	while (!all_sent)
		usleep(50);
	/* Empties the queue. */
	for (char byte; nth == 0 && recv(server, &byte, 1, MSG_DONTWAIT) > 0;)
		;
	if (nth == 0 &&
	    (!strcmp(pattern, "option") || !strcmp(pattern, "time"))) {
		int name = *pattern == 'o' ? SO_REUSEPORT : SO_RCVTIMEO;
		void (**between)(void) =
			dlsym(RTLD_DEFAULT, "run_after_getsockopt");

		printf("before %d", get_option(name, between, NULL));
		printf(" between %d", get_option(name, between, make_plain));
		printf(" after %d\n", get_option(name, between, NULL));
		fflush(stdout);
		_exit(0);
	}
	for (unsigned i = 0; nth == 0 && i < WAITS; i++) {
		unsigned before = handled;

		/* Signals are blocked since the end of the first wait. */
		*after = 2 + i % 4 - (i % 4 && !strcmp(pattern, "mask"));
		if (wait_by_pattern(epoll) < 0 && errno == EINTR &&
		    handled == before + 1)
			interrupted++;
		*after = 0;
	}
	ended += nth == 0;
	pause();
	return arg;
}

int main(int argc, char **argv)
{
	/* Receives without a timeout go on after a handler with SA_RESTART. */
	struct sigaction action = { .sa_handler = handle };
	int i;

	if (argc < 2)
		return 2;
	pattern = argv[1];
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigaction(SIGUSR1, &action, NULL);
	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();
	pin_to_this_cpu();
	hold = 1;
	for (i = 0; parked < WORKERS; i++) {
		send_one(i % FLOWS, 'x');
		usleep(1000);
	}
	wait_for_delivery();
	all_sent = 1;
	/* A wait that nothing interrupts lasts forever. */
	for (i = 0; i < 60000 && !ended; i++)
		usleep(1000);
	printf("interrupted %u of %u\n", interrupted, WAITS);
	fflush(stdout);
	_exit(0);
}
