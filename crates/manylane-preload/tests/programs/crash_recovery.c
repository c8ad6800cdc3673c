/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Four processes receive on one UDP socket, and one dies in the middle of a
 * change, at the failpoint that a variable names:
 *
 *	crash_recovery PATTERN CHANGE
 *
 * "steer": the change from one queue to several. "leave": one is killed and leaves
 * its lane, and another one dies while it recovers that lane. "fallback": a process
 * that never received sets IP_RECVERR. "own-fallback": a process that did receive sets
 * it.
 *
 * All that is sent reaches the surviving processes, once, except for the
 * datagram that each dead process may have been about to return.
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
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loopback.h"

#define FLOWS 16
#define RECEIVERS 4
#define CHANGE 0xffffffffu
#define DATAGRAMS_MAX 100000
/* Waits of at least 100 us: a process may get no CPU time for long. */
#define WAITS_MAX 400000
/* Datagrams after which the sender waits for processes that receive none. */
#define UNPACED 10000
#define PACE_US 50000

struct state {
	_Atomic unsigned received;
	_Atomic unsigned wrong;
	_Atomic unsigned each[RECEIVERS];
	_Atomic unsigned char seen[DATAGRAMS_MAX];
};

static struct state *state;
static int server, ports[FLOWS];
static unsigned sent, died;
static const char *pattern;
static pid_t children[RECEIVERS];
static struct sockaddr_in address;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void set_recverr(void)
{
	int one = 1;

	if (setsockopt(server, SOL_IP, IP_RECVERR, &one, sizeof(one)))
		fail("IP_RECVERR");
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
		unsigned number;
		ssize_t len;

		if (!strcmp(pattern, "poll"))
			poll(&at, 1, -1);
		if (epoll >= 0)
			epoll_wait(epoll, &event, 1, -1);
		len = recv(server, &number, sizeof(number), 0);
		if (len < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (len != sizeof(number))
			fail("recv");
		if (number == CHANGE) {
			set_recverr();
			continue;
		}
		if (number >= DATAGRAMS_MAX)
			state->wrong++;
		else
			state->seen[number]++;
		state->each[nth]++;
		state->received++;
	}
}

static void send_one(unsigned flow, unsigned number)
{
	if (sendto(ports[flow % FLOWS], &number, sizeof(number), 0,
		   (void *)&address, sizeof(address)) != sizeof(number))
		fail("sendto");
}

/* Reaps the children that have died since, and counts them. */
static void reap_children(void)
{
	unsigned i;

	for (i = 0; i < RECEIVERS; i++) {
		if (children[i] <= 0 ||
		    waitpid(children[i], NULL, WNOHANG) != children[i])
			continue;
		children[i] = 0;
		died++;
	}
}

static int wait_for_all(void)
{
	unsigned waited;

	for (waited = 0; state->received + died < sent && waited < WAITS_MAX;
	     waited++) {
		usleep(100);
		reap_children();
	}
	return state->received + died >= sent;
}

/* Sends few enough for any queue. */
static int burst(void)
{
	unsigned i;

	for (i = 0; i < 2 * FLOWS; i++)
		send_one(i, sent++);
	reap_children();
	return wait_for_all();
}

static int is_warm(unsigned deaths)
{
	unsigned i;

	for (i = 0; i < RECEIVERS; i++)
		if (children[i] && state->each[i] < 50)
			return 0;
	return died >= deaths;
}

static void wait_for_deaths(unsigned deaths)
{
	unsigned waited;

	for (waited = 0; died < deaths && waited < WAITS_MAX; waited++) {
		usleep(100);
		reap_children();
	}
}

static void change(const char *what)
{
	pid_t changer;
	int status;

	if (!strcmp(what, "leave")) {
		kill(children[0], SIGKILL);
		wait_for_deaths(1);
	}
	if (!strcmp(what, "own-fallback")) {
		send_one(0, CHANGE);
		wait_for_deaths(1);
	}
	if (!strcmp(what, "fallback")) {
		changer = fork();
		if (changer == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			set_recverr();
			_exit(0);
		}
		if (waitpid(changer, &status, 0) != changer ||
		    !WIFSIGNALED(status))
			printf("the changer lives\n");
	}
}

/*
 * True if falling back is complete. Bypasses any library: while a process may
 * still have to check other queues for datagrams, receives have a timeout.
 */
static int is_plain(void)
{
	struct timeval bound = { 0 };
	socklen_t len = sizeof(bound);

	if (syscall(SYS_getsockopt, server, SOL_SOCKET, SO_RCVTIMEO, &bound,
		    &len))
		fail("SO_RCVTIMEO");
	return !bound.tv_sec && !bound.tv_usec;
}

int main(int argc, char **argv)
{
	unsigned i, once = 0, often = 0, deaths;
	int falls_back;
	pid_t self = getpid();

	if (argc != 3)
		return 2;
	pattern = argv[1];
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	server = loopback_server(strcmp(pattern, "block") ? SOCK_NONBLOCK : 0,
				 &address);
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
	deaths = !strcmp(argv[2], "steer");
	while (!is_warm(deaths) && sent < DATAGRAMS_MAX / 2 && burst())
		if (sent > UNPACED)
			usleep(PACE_US);
	change(argv[2]);
	falls_back = !strcmp(argv[2], "fallback") ||
		     !strcmp(argv[2], "own-fallback");
	for (i = 0; i < 200 && burst(); i++)
		;
	/* Traffic, until falling back is complete. */
	for (i = 0; falls_back && !is_plain() && i < 1000 && burst(); i++)
		usleep(i < 100 ? 20000 : PACE_US);
	if (!strcmp(argv[2], "leave"))
		wait_for_deaths(2);
	for (i = 0; i < sent; i++) {
		once += state->seen[i] == 1;
		often += state->seen[i] > 1;
	}
	printf("all received once: %s, wrong %u, died %u\n",
	       once + died >= sent && !often ? "yes" : "no", state->wrong,
	       died);
	fprintf(stderr, "%s %s: once %u often %u of %u\n", pattern, argv[2],
		once, often, sent);
	for (i = 0; i < RECEIVERS; i++)
		if (children[i] > 0) {
			kill(children[i], SIGKILL);
			waitpid(children[i], NULL, 0);
		}
	return 0;
}
