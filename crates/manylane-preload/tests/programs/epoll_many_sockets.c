/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * More UDP sockets in one epoll instance than the library tracks in one:
 *
 *	epoll_many_sockets SOCKETS
 *
 * Two threads have lanes, and are parked. SOCKETS other sockets are in an
 * instance, and the socket is added to it while each lane holds the same number
 * of datagrams. The main thread receives one each time the instance reports the
 * socket. The socket's entry is modified halfway through those of the first
 * lane. Prints how many were received, which is all, and whether the socket is
 * reported when none is left, when one more has arrived, and when it was
 * removed.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <sys/epoll.h>

/*
 * For each lane: more than arrive there while a flow of the other one is
 * searched.
 */
#define DATAGRAMS_PER_LANE 20
#define DATAGRAMS (WORKERS * DATAGRAMS_PER_LANE)
/* Milliseconds: without the library it takes none of them. */
#define TIMEOUT_MS 100000

static int epoll;

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)payload, (void)from;
}

/* True if the instance reports an entry with that number, and nothing else. */
static int is_reported(unsigned number, int time)
{
	struct epoll_event events[4];
	int count = epoll_wait(epoll, events, 4, time);

	return count == 1 && events[0].data.u64 == number &&
	       events[0].events == EPOLLIN;
}

/*
 * Sends the same number to each lane. Which thread has the program's own socket
 * as its lane depends on which of them received first, so the kernel is asked:
 * a datagram in that socket is in this lane.
 */
static void fill_lanes(void)
{
	int i, own = -1, other = -1, held = 0;
	struct payload payload;

	for (i = 0; i < FLOWS && (own < 0 || other < 0); i++) {
		send_one('x', i, 0);
		wait_for_delivery();
		/* Bypasses the library. */
		if (syscall(SYS_recvfrom, server, &payload, sizeof(payload),
			    MSG_DONTWAIT, NULL, NULL) > 0) {
			own = i;
		} else {
			other = i;
			held++;
		}
	}
	if (own < 0) {
		fprintf(stderr, "no flow is in the program's socket\n");
		exit(1);
	}
	/* Without the library there is no other lane. */
	for (; held < DATAGRAMS; held++)
		send_one('x',
			 held < DATAGRAMS_PER_LANE && other >= 0 ? other : own,
			 held);
	wait_for_delivery();
}

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN };
	int i, got = 0, sockets;
	char data[64];

	if (argc != 2)
		return 2;
	sockets = atoi(argv[1]);
	start_and_park();
	pin_to_this_cpu();
	epoll = epoll_create1(0);
	for (i = 0; i < sockets; i++) {
		struct sockaddr_in at;

		epoll_ctl(epoll, EPOLL_CTL_ADD, loopback_server(0, &at),
			  &event);
	}
	fill_lanes();
	event.data.u64 = 1;
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	while (is_reported(event.data.u64, TIMEOUT_MS) &&
	       recv(server, data, sizeof(data), MSG_DONTWAIT) > 0)
		if (++got == DATAGRAMS_PER_LANE / 2) {
			event.data.u64 = 2;
			epoll_ctl(epoll, EPOLL_CTL_MOD, server, &event);
		} else if (got == DATAGRAMS) {
			break;
		}
	printf("%d of %d\n", got, DATAGRAMS);
	printf("then %d,", is_reported(event.data.u64, 0));
	send_one('x', 0, 0);
	wait_for_delivery();
	printf(" later %d,", is_reported(event.data.u64, 0));
	epoll_ctl(epoll, EPOLL_CTL_DEL, server, NULL);
	printf(" out %d\n", is_reported(event.data.u64, 0));
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
