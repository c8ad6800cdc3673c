/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Waits that end at once each time because of another descriptor, while the
 * lane of an absent thread has datagrams:
 *
 *	wait_starvation CALL BESIDE
 *
 * Two threads have lanes, and are parked, and datagrams arrive for one of them.
 * The main thread waits by CALL (poll, ppoll, select, pselect, epoll; one:
 * epoll with room for one event) for the socket and for BESIDE: a writable pipe
 * (pipe), the same socket for writing (out), another UDP socket that always has
 * a datagram (socket). It receives one datagram each time the socket is
 * reported; by then it has a lane itself. Prints how many it received, which is
 * all.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <sys/epoll.h>
#include <sys/select.h>

#define DATAGRAMS 20
/* Seconds: without the library it takes none of them. */
#define TIMEOUT_S 100

static const char *call, *beside;
/* The other descriptor (the same one for "out"), and the events to wait for. */
static int other, other_events = POLLOUT, epoll;

static int is_reported_by_poll(void)
{
	struct pollfd fds[] = { { .fd = server, .events = POLLIN },
				{ .fd = other, .events = other_events } };

	if (other == server)
		fds[0].events |= other_events;
	if (*call == 'p' && call[1] == 'p')
		ppoll(fds, 2 - (other == server), NULL, NULL);
	else
		poll(fds, 2 - (other == server), -1);
	return fds[0].revents & POLLIN;
}

static int is_reported_by_select(void)
{
	fd_set read, write;
	int top = server > other ? server : other;

	FD_ZERO(&read);
	FD_ZERO(&write);
	FD_SET(server, &read);
	FD_SET(other, other_events == POLLIN ? &read : &write);
	if (*call == 'p')
		pselect(top + 1, &read, &write, NULL, NULL, NULL);
	else
		select(top + 1, &read, &write, NULL, NULL);
	return FD_ISSET(server, &read);
}

static int is_reported_by_epoll(void)
{
	struct epoll_event events[4];
	int count = epoll_wait(epoll, events, *call == 'o' ? 1 : 4, -1);
	int i, reported = 0;

	for (i = 0; i < count; i++)
		if (events[i].data.fd == server && events[i].events & EPOLLIN)
			reported++;
	if (reported > 1 || count > 2)
		printf("%d events, %d of the socket\n", count, reported);
	return reported;
}

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)payload, (void)from;
}

/* Receives all; returns the number. */
static int receive_all(void)
{
	struct timespec start, now;
	int reported, got = 0;
	char data[64];

	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		reported =
			strstr(call, "select") ? is_reported_by_select() :
			strstr(call, "poll") == call || !strcmp(call, "ppoll") ?
						 is_reported_by_poll() :
						 is_reported_by_epoll();
		if (reported &&
		    recv(server, data, sizeof(data), MSG_DONTWAIT) > 0)
			got++;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (got < DATAGRAMS && now.tv_sec - start.tv_sec < TIMEOUT_S);
	return got;
}

static void prepare(void)
{
	struct epoll_event event = { .events = EPOLLIN, .data.fd = server };
	struct sockaddr_in address;
	int pipes[2];

	if (!strcmp(beside, "out")) {
		other = server;
		event.events |= EPOLLOUT;
	} else if (!strcmp(beside, "pipe") && !pipe(pipes)) {
		other = pipes[1];
	} else {
		other = loopback_server(0, &address);
		other_events = POLLIN;
		sendto(other, "x", 1, 0, (void *)&address, sizeof(address));
	}
	epoll = epoll_create1(0);
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	event = (struct epoll_event){ .events = other_events,
				      .data.fd = other };
	if (other != server)
		epoll_ctl(epoll, EPOLL_CTL_ADD, other, &event);
}

int main(int argc, char **argv)
{
	int i;

	if (argc != 3)
		return 2;
	call = argv[1];
	beside = argv[2];
	start_and_park();
	prepare();
	pin_to_this_cpu();
	for (i = 0; i < DATAGRAMS; i++)
		send_one('x', nth_flow(0, i), i);
	wait_for_delivery();
	printf("%d of %d\n", receive_all(), DATAGRAMS);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
