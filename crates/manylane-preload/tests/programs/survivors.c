/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Four processes receive on one UDP socket, and two of them come to harm:
 *
 *	survivors PATTERN HARM
 *
 * What was sent to them before, and all that is sent afterwards, has to reach
 * the others, once; and who waits for more may not use the processor for it.
 *
 * HARM: "waiting" and "busy" are killed in a wait, and between two receives;
 * with "reaped" nothing is left of the first kind. "stopped" come back later.
 * "load" are killed in a wait, and the others then never wait for long; with
 * "pauses" they do. "running" are killed at any moment under load: each may
 * take with it what it had just received.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 16
#define RECEIVERS 4
#define HARMED 2
#define STOP 0xffffffffu
#define HANG 0xfffffffeu
#define MOST 100000
/* Waits of 100 us and more, for what does come. */
#define PATIENCE 200000

struct state {
	_Atomic unsigned received;
	_Atomic unsigned wrong;
	_Atomic unsigned each[RECEIVERS];
	_Atomic unsigned hung;
	_Atomic int who_hangs[RECEIVERS];
	_Atomic unsigned char seen[MOST];
};

static struct state *state;
static int server, ports[FLOWS];
static unsigned sent;
/* What the dead may have taken with them. */
static unsigned in_hands;
static const char *pattern, *harm;
static pid_t children[RECEIVERS];
static struct sockaddr_in address;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

/* What a receiver does with a datagram; says whether it is to end. */
static int take(unsigned nth, unsigned number)
{
	if (number == STOP)
		return 1;
	if (number == HANG) {
		unsigned at = state->hung++;

		/* The first ones are harmed here. */
		if (at < HARMED) {
			state->who_hangs[at] = nth;
			for (;;)
				pause();
		}
		return 0;
	}
	if (number >= MOST)
		state->wrong++;
	else
		state->seen[number]++;
	state->each[nth]++;
	state->received++;
	return 0;
}

static void receiver(unsigned nth)
{
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = -1;

	if (!strcmp(pattern, "epoll")) {
		epoll = epoll_create1(0);
		if (epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event))
			die("epoll_ctl");
	}
	for (;;) {
		unsigned data[2];
		ssize_t len;

		int count = 1;

		if (!strcmp(pattern, "poll"))
			count = poll(&at, 1, -1);
		if (epoll >= 0)
			count = epoll_wait(epoll, &event, 1, -1);
		/* To be stopped and to go on interrupts a wait for events. */
		if (count != 1 && errno != EINTR)
			state->wrong++;
		/* Never to the end: the next wait finds something at once. */
		len = recv(server, data, sizeof(data), 0);
		if (len < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (len != sizeof(data))
			die("recv");
		if (take(nth, data[0]))
			return;
	}
}

static void send_one(unsigned flow, unsigned number)
{
	unsigned data[2] = { number, 0 };

	if (sendto(ports[flow % FLOWS], data, sizeof(data), 0, (void *)&address,
		   sizeof(address)) != sizeof(data))
		die("sendto");
}

static void burst(void)
{
	unsigned flow;

	for (flow = 0; flow < FLOWS; flow++)
		send_one(flow, sent++);
}

static int all_came(void)
{
	return state->received + in_hands >= sent;
}

/* Everything that was sent has come, or does not come any more. */
static int await_all(void)
{
	unsigned waited;

	for (waited = 0; !all_came() && waited < PATIENCE; waited++)
		usleep(100);
	return all_came();
}

static void warm_up(void)
{
	unsigned i, ready;

	do {
		for (i = 0; i < 20; i++) {
			burst();
			await_all();
		}
		ready = 0;
		for (i = 0; i < RECEIVERS; i++)
			ready += state->each[i] >= 50;
	} while (ready < RECEIVERS && sent < MOST / 2);
}

static void to(unsigned first, unsigned end, int signal)
{
	unsigned i;

	for (i = first; i < end; i++)
		kill(children[i], signal);
}

/* Those that are harmed come first. */
static void swap(unsigned one, unsigned other)
{
	pid_t pid = children[one];

	children[one] = children[other];
	children[other] = pid;
}

static void hang(void)
{
	unsigned flow = 0;
	int first, second;

	while (state->hung < HARMED) {
		send_one(flow++, HANG);
		usleep(1000);
	}
	usleep(50000);
	first = state->who_hangs[0];
	second = state->who_hangs[1];
	swap(0, first);
	swap(1, second == 0 ? first : second);
}

/* Processor time of those that are left, in microseconds. */
static long used(unsigned first)
{
	long sum = 0;
	unsigned i;

	for (i = first; i < RECEIVERS; i++) {
		struct timespec time;
		clockid_t clock;

		if (clock_getcpuclockid(children[i], &clock) ||
		    clock_gettime(clock, &time))
			die("clock");
		sum += time.tv_sec * 1000000 + time.tv_nsec / 1000;
	}
	return sum;
}

/*
 * Those that are left had their turn since the counts BEFORE, or there was
 * nothing for them. On a machine that lets them wait, a plain socket would lose
 * what comes meanwhile, too.
 */
static int had_turns(const unsigned *before)
{
	unsigned i;

	if (all_came())
		return 1;
	for (i = HARMED; i < RECEIVERS; i++)
		if (state->each[i] == before[i])
			return 0;
	return 1;
}

/*
 * A burst every PACE microseconds, LEAST times, and until what was sent first
 * has come. The lanes of the dead hold some 270 datagrams each: who notices
 * them by chance, and not at once, loses some.
 */
static void load(unsigned first, unsigned pace, unsigned least,
		 unsigned kill_at)
{
	unsigned i, at, waited, missing, before[RECEIVERS];

	for (i = 0; i < 2000; i++) {
		for (at = 0; at < RECEIVERS; at++)
			before[at] = state->each[at];
		burst();
		if (kill_at && i == kill_at) {
			in_hands = HARMED;
			to(0, HARMED, SIGKILL);
		}
		usleep(pace);
		for (waited = 0; !had_turns(before) && waited < PATIENCE;
		     waited++)
			usleep(100);
		missing = 0;
		for (at = 0; at < first; at++)
			missing += state->seen[at] == 0;
		if (missing <= in_hands && i >= least)
			return;
	}
}

static void do_harm(void)
{
	unsigned i, before;

	if (!strcmp(harm, "busy"))
		hang();
	if (!strcmp(harm, "running")) {
		load(sent, 5000, 300, 20);
		return;
	}
	/* Nobody takes what now comes to the lanes of all. */
	to(0, RECEIVERS, SIGSTOP);
	for (i = 0; i < RECEIVERS; i++)
		waitpid(children[i], NULL, WUNTRACED);
	burst();
	burst();
	usleep(300000);
	if (strcmp(harm, "stopped"))
		to(0, HARMED, SIGKILL);
	if (!strcmp(harm, "reaped"))
		for (i = 0; i < HARMED; i++)
			waitpid(children[i], NULL, 0);
	before = sent;
	to(HARMED, RECEIVERS, SIGCONT);
	/* With "load" no wait lasts for a slice. */
	if (!strcmp(harm, "load"))
		load(before, 5000, 300, 0);
	if (!strcmp(harm, "pauses"))
		load(before, 50000, 20, 0);
}

int main(int argc, char **argv)
{
	unsigned i, once = 0, never = 0, often = 0;
	int poll_like;
	pid_t self = getpid();
	long idle;

	if (argc != 3)
		return 2;
	pattern = argv[1];
	harm = argv[2];
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	poll_like = strcmp(pattern, "block");
	server = loopback_server(poll_like ? SOCK_NONBLOCK : 0, &address);
	for (i = 0; i < FLOWS; i++)
		ports[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < RECEIVERS; i++) {
		children[i] = fork();
		if (children[i] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() == self)
				receiver(i);
			_exit(0);
		}
	}
	warm_up();
	do_harm();
	for (i = 0; i < 200 && await_all(); i++)
		burst();
	await_all();
	idle = used(HARMED);
	usleep(500000);
	idle = used(HARMED) - idle;
	if (!strcmp(harm, "stopped")) {
		to(0, HARMED, SIGCONT);
		for (i = 0; i < 200 && await_all(); i++)
			burst();
		await_all();
	}
	for (i = 0; i < sent; i++) {
		once += state->seen[i] == 1;
		never += state->seen[i] == 0;
		often += state->seen[i] > 1;
	}
	/* Waits that are waits cost some microseconds each. */
	printf("all came once: %s, wrong %u, idle: %s\n",
	       once + in_hands >= sent && !often ? "yes" : "no", state->wrong,
	       idle < 150000 ? "yes" : "no");
	fprintf(stderr, "%s %s: once %u never %u often %u of %u, %ld us\n",
		pattern, harm, once, never, often, sent, idle);
	to(0, RECEIVERS, SIGKILL);
	for (i = 0; i < RECEIVERS; i++)
		waitpid(children[i], NULL, 0);
	return 0;
}
