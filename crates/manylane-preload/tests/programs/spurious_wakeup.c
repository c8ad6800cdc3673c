/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Waits that return at once although no datagram is queued:
 *
 *	spurious_wakeup CASE
 *
 * "nonblock": a descriptor is made non-blocking, unseen by the library.
 * "laneless": one lane reports an event that is no datagram, and a thread without
 * a lane checks all lanes. "poll", "epoll": the same, and the owner of another
 * lane waits for events.
 *
 * Prints whether the library and the program make no more calls than if nearly
 * each lasted for a slice.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "warm_up.h"

/*
 * The longest duration of a wait, and the calls that may be made in that time:
 * some short ones before a full one, by each of three threads.
 */
#define SLICE_NS 20000000L
#define CALLS_MAX 300

static _Atomic unsigned hold, held;
static _Atomic unsigned long program_calls;
static const char *pattern;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = -1, waits = nth == 1 && strcmp(pattern, "laneless") &&
				strcmp(pattern, "nonblock");

	if (waits && !strcmp(pattern, "epoll")) {
		epoll = epoll_create1(0);
		epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	}
	for (;;) {
		char byte;

		if (waits && epoll < 0)
			poll(&at, 1, -1);
		if (waits && epoll >= 0)
			epoll_wait(epoll, &event, 1, -1);
		program_calls++;
		if (recv(server, &byte, 1, waits ? MSG_DONTWAIT : 0) < 1)
			continue;
		count_received(nth);
		if (hold && nth == 0) {
			held = 1;
			for (;;)
				pause();
		}
	}
	return NULL;
}

static void *laneless_receiver(void *arg)
{
	char byte;

	recv(server, &byte, 1, 0);
	return arg;
}

static long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000 + time.tv_nsec;
}

int main(int argc, char **argv)
{
	_Atomic unsigned long *calls = dlsym(RTLD_DEFAULT, "counted_calls");
	pthread_t thread;
	unsigned long calls_before, program_calls_before, calls_max;
	long start;
	int i;

	if (argc < 2 || !calls)
		return 2;
	pattern = argv[1];
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	server = loopback_server(0, &address);
	open_clients();
	/* The first one keeps the program's own socket. */
	for (i = 0; i < WORKERS; i++) {
		start_worker(i);
		while (!received[i])
			send_all_and_wait('x');
	}
	for (i = 0; i < 100; i++)
		send_all_and_wait('x');
	warm_up();
	if (strcmp(pattern, "nonblock")) {
		unsigned sent = total;

		hold = 1;
		while (!held) {
			if (sent - total < 2 * FLOWS) {
				send_all('x');
				sent += FLOWS;
			}
			usleep(50);
		}
		/*
		 * Also those that are left in the lane of the absent thread.
		 * Then the other one has time to wait again.
		 */
		while (total < sent)
			usleep(50);
		usleep(200000);
		syscall(SYS_shutdown, server, SHUT_RD);
	} else {
		syscall(SYS_fcntl, server, F_SETFL, O_RDWR | O_NONBLOCK);
	}
	if (!strcmp(pattern, "laneless"))
		pthread_create(&thread, NULL, laneless_receiver, NULL);
	start = now();
	calls_before = *calls;
	program_calls_before = program_calls;
	usleep(1000000);
	calls_max = ((now() - start) / SLICE_NS + 1) * CALLS_MAX;
	printf("waits: %s\n", *calls - calls_before < calls_max ? "yes" : "no");
	printf("program: %s\n", program_calls - program_calls_before <
						calls_max / CALLS_MAX * 3 ?
					"yes" :
					"no");
	fprintf(stderr, "%s: %lu calls, %lu by the program\n", pattern,
		*calls - calls_before, program_calls - program_calls_before);
	return 0;
}
