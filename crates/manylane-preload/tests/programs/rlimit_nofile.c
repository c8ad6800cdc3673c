/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server that lowers its limit of open files once it has lanes, whose
 * descriptors are beyond that:
 *
 *	rlimit_nofile CALL LIMIT
 *
 * Two threads have lanes, and are parked with datagrams of all flows in them.
 * The main thread lowers the limit, and receives what is there and then what
 * comes, one datagram each time one is reported by CALL: poll, ppoll,
 * select, pselect, epoll; many: select with more descriptors than the limit;
 * nested: epoll for an instance with the socket in it; plain: select, once an
 * option has made the socket plain. recv: it blocks in recvfrom; handler: the
 * same, with a handler of a signal that interrupts it. lanes: the threads
 * receive themselves. Prints how many were there and how many came, which are
 * all, what is reported when none is left, and what calls beyond the limit answer.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/select.h>

#define EACH 5
#define DATAGRAMS (EACH * FLOWS)
/* Descriptors to wait for beside the socket, which have nothing. */
#define OTHERS 20

static const char *call;
static int epoll, outer, others[OTHERS];
static _Atomic int handled;

static int is(const char *what)
{
	return !strcmp(call, what);
}

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)payload, (void)from;
	handled++;
}

static void nothing(int signal)
{
	(void)signal;
}

/* Polls the socket, or waits for it without a timeout. */
static int wait_for_datagram(int waits)
{
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct timespec time = { 0, 0 };
	struct timeval short_time = { 0, 0 };
	struct epoll_event event;
	int i, top = server, count;
	fd_set set;

	FD_ZERO(&set);
	FD_SET(server, &set);
	for (i = 0; is("many") && i < OTHERS; i++) {
		FD_SET(others[i], &set);
		top = others[i] > top ? others[i] : top;
	}
	if (is("poll"))
		count = poll(&at, 1, waits ? -1 : 0);
	else if (is("ppoll"))
		count = ppoll(&at, 1, waits ? NULL : &time, NULL);
	else if (is("pselect"))
		count = pselect(top + 1, &set, NULL, NULL, waits ? NULL : &time,
				NULL);
	else if (is("epoll"))
		count = epoll_wait(epoll, &event, 1, waits ? -1 : 0);
	else if (is("nested"))
		count = epoll_wait(outer, &event, 1, waits ? -1 : 0);
	else
		count = select(top + 1, &set, NULL, NULL,
			       waits ? NULL : &short_time);
	if (count < 0)
		printf("%s: %s\n", call, strerrorname_np(errno));
	return count;
}

/* Whether there was one. */
static int receive_one(void)
{
	int blocks = is("recv") || is("handler");
	struct sockaddr_in from;
	socklen_t len = sizeof(from);
	struct payload payload;

	if (!blocks && wait_for_datagram(1) != 1)
		return 0;
	if (recvfrom(server, &payload, sizeof(payload),
		     blocks ? 0 : MSG_DONTWAIT, (void *)&from,
		     &len) != sizeof(payload)) {
		printf("recvfrom: %s\n", strerrorname_np(errno));
		return 0;
	}
	return 1;
}

/* A number that the program does not have, and the kernel has; else any. */
static int unknown_number(void)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *at;
	int found = 600;

	while ((at = readdir(dir)))
		if (at->d_name[0] != '.' && atoi(at->d_name) > 100 &&
		    fcntl(atoi(at->d_name), F_GETFD) < 0)
			found = atoi(at->d_name);
	closedir(dir);
	return found;
}

static void lower(rlim_t limit)
{
	struct rlimit to;

	getrlimit(RLIMIT_NOFILE, &to);
	to.rlim_cur = limit;
	if (setrlimit(RLIMIT_NOFILE, &to))
		perror("setrlimit");
}

static void say(const char *what, int answer)
{
	printf("%s: %d %s\n", what, answer,
	       answer < 0 ? strerrorname_np(errno) : "");
}

/* What the kernel refuses stays refused. */
static void refused(int number)
{
	struct pollfd fds[OTHERS];
	int i, kept = 0;

	for (i = 0; i < OTHERS; i++)
		fds[i] = (struct pollfd){ server, POLLIN, -1 };
	say("poll", poll(fds, OTHERS, -1));
	say("ppoll", ppoll(fds, OTHERS, NULL, NULL));
	for (i = 0; i < OTHERS; i++)
		kept += fds[i].revents == -1;
	printf("%d kept\n", kept);
	say("dup2", dup2(server, number));
	say("dup3", dup3(server, number, 0));
}

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct sigaction action = { .sa_handler = nothing };
	int i, on = 1, queued = 0, sent = 0, number, pipes[2];

	if (argc != 3 || pipe(pipes))
		return 2;
	call = argv[1];
	alarm(300);
	if (is("handler"))
		sigaction(SIGUSR1, &action, NULL);
	start_and_park();
	pin_to_this_cpu();
	for (i = 0; i < OTHERS; i++)
		others[i] = dup(pipes[0]);
	epoll = epoll_create1(0);
	outer = epoll_create1(0);
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	number = unknown_number();
	for (i = 0; i < DATAGRAMS; i++)
		send_one('x', i % FLOWS, i);
	wait_for_delivery();
	lower(strtoul(argv[2], NULL, 0));
	if (is("nested"))
		epoll_ctl(outer, EPOLL_CTL_ADD, epoll, &event);
	if (is("plain"))
		setsockopt(server, IPPROTO_IP, IP_RECVERR, &on, sizeof(on));
	if (is("lanes")) {
		park[0] = park[1] = 0;
		while (handled < DATAGRAMS)
			raw_sleep();
		queued = handled;
		for (i = 0; i < DATAGRAMS; i++)
			send_one('x', i % FLOWS, i);
		while (handled < 2 * DATAGRAMS)
			raw_sleep();
		sent = handled - queued;
	} else {
		while (queued < DATAGRAMS && receive_one())
			queued++;
		printf("then %d\n", wait_for_datagram(0));
		for (i = 0; i < DATAGRAMS; i++) {
			send_one('x', i % FLOWS, i);
			sent += receive_one();
		}
		printf("then %d\n", wait_for_datagram(0));
	}
	printf("%d and %d of %d\n", queued, sent, DATAGRAMS);
	refused(number);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
