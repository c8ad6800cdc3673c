/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Four processes receive on one UDP socket, and two of them are killed or
 * stopped:
 *
 *	receiver_death PATTERN FAULT
 *
 * All datagrams that were sent to them before, and all that are sent
 * afterwards, have to reach the others, once. A process that waits for more
 * must not use the CPU.
 *
 * "waiting" and "busy": killed in a wait, and between two receives. "reaped":
 * as waiting, and the parent has reaped them. "stopped": they continue later.
 * "load": killed in a wait, and the others then never wait for long; with
 * "pauses" they do. "running": killed at any moment under load; each may lose
 * the datagram that it had just received, and with a library those of a call
 * that receives ahead.
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
#define VICTIMS 2
#define STOP 0xffffffffu
#define HANG 0xfffffffeu
#define DATAGRAMS_MAX 100000
/* Waits of at least 100 us: a process may get no CPU time for long. */
#define WAITS_MAX 400000
/* Datagrams that the library may receive ahead. */
#define PREFETCH_MAX 32
/* Messages that are sent to hang receivers and not received yet. */
#define HANGS_IN_FLIGHT 32

struct state {
	_Atomic unsigned received;
	_Atomic unsigned wrong;
	_Atomic unsigned each[RECEIVERS];
	_Atomic unsigned hung;
	_Atomic int who_hangs[VICTIMS]; /* the number of each, plus 1 */
	_Atomic unsigned char seen[DATAGRAMS_MAX];
};

static struct state *state;
static int server, ports[FLOWS];
static unsigned sent;
/* Datagrams that the dead processes may have had. */
static unsigned lost_max;
static const char *pattern, *fault;
static pid_t children[RECEIVERS];
static struct sockaddr_in address;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* Handles a datagram; true if the receiver is to end. */
static int handle_datagram(unsigned nth, unsigned number)
{
	if (number == STOP)
		return 1;
	if (number == HANG) {
		unsigned at = state->hung++;

		/* The first ones are killed or stopped here. */
		if (at < VICTIMS) {
			state->who_hangs[at] = nth + 1;
			for (;;)
				pause();
		}
		return 0;
	}
	if (number >= DATAGRAMS_MAX)
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
			fail("epoll_ctl");
	}
	for (;;) {
		unsigned data[2];
		ssize_t len;

		int count = 1;

		if (!strcmp(pattern, "poll"))
			count = poll(&at, 1, -1);
		if (epoll >= 0)
			count = epoll_wait(epoll, &event, 1, -1);
		/* A stop and a continuation interrupt a wait for events. */
		if (count != 1 && errno != EINTR)
			state->wrong++;
		/*
		 * Not until the queue is empty: the next wait then ends at
		 * once.
		 */
		len = recv(server, data, sizeof(data), 0);
		if (len < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (len != sizeof(data))
			fail("recv");
		if (handle_datagram(nth, data[0]))
			return;
	}
}

static void send_one(unsigned flow, unsigned number)
{
	unsigned data[2] = { number, 0 };

	if (sendto(ports[flow % FLOWS], data, sizeof(data), 0, (void *)&address,
		   sizeof(address)) != sizeof(data))
		fail("sendto");
}

static void burst(void)
{
	unsigned flow;

	for (flow = 0; flow < FLOWS; flow++)
		send_one(flow, sent++);
}

static int has_all_arrived(void)
{
	return state->received + lost_max >= sent;
}

/* Waits until everything has arrived; false if nothing arrives any more. */
static int wait_for_all(void)
{
	unsigned waited;

	for (waited = 0; !has_all_arrived() && waited < WAITS_MAX; waited++)
		usleep(100);
	return has_all_arrived();
}

/* Sends when all has arrived, many times. */
static void check_flow(void)
{
	unsigned i;

	for (i = 0; i < 200; i++) {
		if (!wait_for_all())
			return;
		burst();
	}
	wait_for_all();
}

static void warm_up(void)
{
	unsigned i, ready;

	do {
		for (i = 0; i < 20; i++) {
			burst();
			wait_for_all();
		}
		ready = 0;
		for (i = 0; i < RECEIVERS; i++)
			ready += state->each[i] >= 50;
	} while (ready < RECEIVERS && sent < DATAGRAMS_MAX / 2);
}

static void signal_range(unsigned first, unsigned end, int signal)
{
	unsigned i;

	for (i = first; i < end; i++)
		kill(children[i], signal);
}

/* The first processes are those to kill or stop. */
static void swap_children(unsigned one, unsigned other)
{
	pid_t pid = children[one];

	children[one] = children[other];
	children[other] = pid;
}

static void hang(void)
{
	unsigned flow = 0;
	int first, second;

	while (!state->who_hangs[0] || !state->who_hangs[1]) {
		/* All queues keep room for what is sent later. */
		if (flow - state->hung < HANGS_IN_FLIGHT)
			send_one(flow++, HANG);
		usleep(1000);
	}
	first = state->who_hangs[0] - 1;
	second = state->who_hangs[1] - 1;
	swap_children(0, first);
	swap_children(1, second == 0 ? first : second);
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* CPU time of the survivors, in microseconds. */
static long cpu_time_us(unsigned first)
{
	long sum = 0;
	unsigned i;

	for (i = first; i < RECEIVERS; i++) {
		struct timespec time;
		clockid_t clock;

		if (clock_getcpuclockid(children[i], &clock) ||
		    clock_gettime(clock, &time))
			fail("clock");
		sum += time.tv_sec * 1000000 + time.tv_nsec / 1000;
	}
	return sum;
}

/*
 * True if each survivor has received since `before`, or there was nothing to
 * receive. On a machine that does not run them, a plain socket would lose
 * datagrams, too.
 */
static int have_all_received(const unsigned *before)
{
	unsigned i;

	if (has_all_arrived())
		return 1;
	for (i = VICTIMS; i < RECEIVERS; i++)
		if (state->each[i] == before[i])
			return 0;
	return 1;
}

/*
 * Sends a burst every `pace` microseconds, at least `bursts_min` times, and until
 * the first datagrams have arrived. The lanes of dead processes hold some 270
 * datagrams each: a process that notices them only by chance loses some.
 */
static void send_load(unsigned first, unsigned pace, unsigned bursts_min,
		      unsigned kill_at)
{
	unsigned i, at, waited, missing, before[RECEIVERS];

	for (i = 0; i < 2000; i++) {
		for (at = 0; at < RECEIVERS; at++)
			before[at] = state->each[at];
		burst();
		if (kill_at && i == kill_at) {
			lost_max = VICTIMS;
			if (getenv("LD_PRELOAD"))
				lost_max += VICTIMS * PREFETCH_MAX;
			signal_range(0, VICTIMS, SIGKILL);
			/* Without CPU time they cannot die. */
			for (at = 0; at < VICTIMS; at++)
				waitid(P_PID, children[at], NULL,
				       WEXITED | WNOWAIT);
		}
		usleep(pace);
		for (waited = 0;
		     !have_all_received(before) && waited < WAITS_MAX; waited++)
			usleep(100);
		missing = 0;
		for (at = 0; at < first; at++)
			missing += state->seen[at] == 0;
		if (missing <= lost_max && i >= bursts_min)
			return;
	}
}

static void inject_fault(void)
{
	unsigned i, before;

	if (!strcmp(fault, "busy"))
		hang();
	if (!strcmp(fault, "running")) {
		send_load(sent, 5000, 300, 20);
		return;
	}
	/* No process receives what now arrives in the lanes. */
	signal_range(0, RECEIVERS, SIGSTOP);
	for (i = 0; i < RECEIVERS; i++)
		waitpid(children[i], NULL, WUNTRACED);
	burst();
	burst();
	usleep(300000);
	if (strcmp(fault, "stopped"))
		signal_range(0, VICTIMS, SIGKILL);
	if (!strcmp(fault, "reaped"))
		for (i = 0; i < VICTIMS; i++)
			waitpid(children[i], NULL, 0);
	before = sent;
	signal_range(VICTIMS, RECEIVERS, SIGCONT);
	/* With "load", no wait lasts for a slice. */
	if (!strcmp(fault, "load"))
		send_load(before, 5000, 300, 0);
	if (!strcmp(fault, "pauses"))
		send_load(before, 50000, 20, 0);
}

int main(int argc, char **argv)
{
	unsigned i, once = 0, never = 0, often = 0;
	int poll_like;
	pid_t self = getpid();
	long idle, idle_ms;

	if (argc != 3)
		return 2;
	pattern = argv[1];
	fault = argv[2];
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
	inject_fault();
	check_flow();
	idle = cpu_time_us(VICTIMS);
	idle_ms = now_ms();
	usleep(500000);
	idle = cpu_time_us(VICTIMS) - idle;
	/* This process may have got no CPU time for longer. */
	idle_ms = now_ms() - idle_ms;
	if (!strcmp(fault, "stopped")) {
		signal_range(0, VICTIMS, SIGCONT);
		check_flow();
	}
	for (i = 0; i < sent; i++) {
		once += state->seen[i] == 1;
		never += state->seen[i] == 0;
		often += state->seen[i] > 1;
	}
	/* A real wait costs some microseconds. */
	printf("all received once: %s, wrong %u, idle: %s\n",
	       once + lost_max >= sent && !often ? "yes" : "no", state->wrong,
	       idle < 300 * idle_ms ? "yes" : "no");
	fprintf(stderr,
		"%s %s: once %u never %u often %u of %u, %ld us of %ld ms\n",
		pattern, fault, once, never, often, sent, idle, idle_ms);
	signal_range(0, RECEIVERS, SIGKILL);
	for (i = 0; i < RECEIVERS; i++)
		waitpid(children[i], NULL, 0);
	return 0;
}
