/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * More UDP sockets in one epoll instance than the library keeps lanes for:
 *
 *	crowd SOCKETS
 *
 * Two threads have lanes, and are parked. SOCKETS others are in an instance,
 * and the socket comes into it while each of the lanes holds as many datagrams.
 * The main thread receives one for each time that the instance tells of the
 * socket, whose entry is changed in the midst of those of the first lane. Prints
 * how many came, which are all, and what is told when none is left, when one more
 * has come, and when the socket is out again.
 */
#define _GNU_SOURCE
#include "shares.h"
#include <sys/epoll.h>

/* For each lane: more than may come to one while a flow for the other is sought. */
#define EACH 20
#define ALL (WORKERS * EACH)
/* Milliseconds: natively it takes none of them. */
#define PATIENCE 10000

static int epoll;

static void handle(unsigned nth, const struct word *word,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)word, (void)from;
}

/* Whether the instance tells of an entry with that number, and of nothing else. */
static int is_told(unsigned number, int time)
{
	struct epoll_event events[4];
	int count = epoll_wait(epoll, events, 4, time);

	return count == 1 && events[0].data.u64 == number &&
	       events[0].events == EPOLLIN;
}

/*
 * Sends as many to each lane. Which thread has the program's own socket as its
 * lane depends on which of them received first, so the kernel is asked: what it has
 * in that socket is for this lane.
 */
static void fill_lanes(void)
{
	int i, own = -1, other = -1, held = 0;
	struct word word;

	for (i = 0; i < FLOWS && (own < 0 || other < 0); i++) {
		send_one('x', i, 0);
		settle();
		/* Past the library. */
		if (syscall(SYS_recvfrom, server, &word, sizeof(word),
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
	/* Natively there is no other one. */
	for (; held < ALL; held++)
		send_one('x', held < EACH && other >= 0 ? other : own, held);
	settle();
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
	stay_here();
	epoll = epoll_create1(0);
	for (i = 0; i < sockets; i++) {
		struct sockaddr_in at;

		epoll_ctl(epoll, EPOLL_CTL_ADD, loopback_server(0, &at),
			  &event);
	}
	fill_lanes();
	event.data.u64 = 1;
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	while (is_told(event.data.u64, PATIENCE) &&
	       recv(server, data, sizeof(data), MSG_DONTWAIT) > 0)
		if (++got == EACH / 2) {
			event.data.u64 = 2;
			epoll_ctl(epoll, EPOLL_CTL_MOD, server, &event);
		} else if (got == ALL) {
			break;
		}
	printf("%d of %d\n", got, ALL);
	printf("then %d,", is_told(event.data.u64, 0));
	send_one('x', 0, 0);
	settle();
	printf(" later %d,", is_told(event.data.u64, 0));
	epoll_ctl(epoll, EPOLL_CTL_DEL, server, NULL);
	printf(" out %d\n", is_told(event.data.u64, 0));
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
