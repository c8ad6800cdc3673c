/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Two processes receive on one UDP socket. Each is process 1 of a PID
 * namespace of its own, so their ids are the same. One of them ends, by
 * exit(3) or by SIGKILL, and the other one receives all that is sent then:
 *
 *	pid_namespaces exit|kill
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "loopback.h"

#define FLOWS 16
#define RECEIVERS 2
/* Datagrams that each has received, both being known, before one of them ends. */
#define SHARE_MIN 100
#define ROUNDS_AFTER 50

struct state {
	_Atomic int id[RECEIVERS];
	_Atomic unsigned received[RECEIVERS];
	_Atomic int end, has_ended;
};

static struct state *state;
static int server, clients[FLOWS], by_kill;
static struct sockaddr_in address;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void receive(unsigned nth)
{
	char byte;

	state->id[nth] = getpid();
	while (recv(server, &byte, 1, 0) == 1) {
		state->received[nth]++;
		if (nth == 1 && state->end && !by_kill)
			exit(0);
	}
	fail("recv");
}

/* The receiver's parent, which is in the namespace of the test. */
static void start(unsigned nth)
{
	pid_t child = fork();

	if (child < 0)
		fail("fork");
	if (child)
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (unshare(CLONE_NEWPID))
		fail("unshare");
	child = fork();
	if (child < 0)
		fail("fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		receive(nth);
	}
	while (nth == 0 || !state->end)
		usleep(100);
	if (by_kill)
		kill(child, SIGKILL);
	if (waitpid(child, NULL, 0) != child)
		fail("waitpid");
	state->has_ended = 1;
	_exit(0);
}

static unsigned total(void)
{
	return state->received[0] + state->received[1];
}

/* One datagram of each flow; all have been received when it returns. */
static void send_round(void)
{
	unsigned wanted = total() + FLOWS, i;

	for (i = 0; i < FLOWS; i++)
		if (sendto(clients[i], "x", 1, 0, (void *)&address,
			   sizeof(address)) != 1)
			fail("sendto");
	while (total() < wanted)
		usleep(50);
}

/* Rounds until each receiver has received so many more. */
static void send_to_each(unsigned datagrams)
{
	unsigned wanted[RECEIVERS], i;

	for (i = 0; i < RECEIVERS; i++)
		wanted[i] = state->received[i] + datagrams;
	for (i = 0; i < RECEIVERS; i++)
		while (state->received[i] < wanted[i])
			send_round();
}

int main(int argc, char **argv)
{
	unsigned i, before;

	by_kill = argc > 1 && !strcmp(argv[1], "kill");
	state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (state == MAP_FAILED)
		fail("mmap");
	server = loopback_server(0, &address);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < RECEIVERS; i++)
		start(i);
	/*
	 * The first one may have waited as the only receiver, and may not get a
	 * CPU for long: what the other one receives meanwhile does not count.
	 */
	send_to_each(1);
	send_to_each(SHARE_MIN);
	state->end = 1;
	/* The one that is killed has nothing in its hands. */
	while (!state->has_ended)
		if (by_kill)
			usleep(100);
		else
			send_round();
	before = state->received[0];
	for (i = 0; i < ROUNDS_AFTER; i++)
		send_round();
	printf("ids %d and %d, %u received after the end\n", state->id[0],
	       state->id[1], state->received[0] - before);
	return 0;
}
