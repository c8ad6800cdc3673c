/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * More UDP sockets in one epoll instance than the library keeps lanes for:
 *
 *	crowd SOCKETS
 *
 * Two threads have lanes, and are parked. SOCKETS others are in an instance,
 * and the socket comes into it while both lanes hold datagrams. The main
 * thread receives one for each time that the instance tells of the socket, whose
 * entry is changed halfway. Prints how many came, which are all, and what is told
 * when none is left, when one more has come, and when the socket is out again.
 */
#define _GNU_SOURCE
#include "shares.h"
#include <sys/epoll.h>

#define SOME 20
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
	for (i = 0; i < SOME; i++)
		send_one('x', flow_of(i % WORKERS, i), i);
	settle();
	event.data.u64 = 1;
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	while (is_told(event.data.u64, PATIENCE) &&
	       recv(server, data, sizeof(data), MSG_DONTWAIT) > 0)
		if (++got == SOME / 2) {
			event.data.u64 = 2;
			epoll_ctl(epoll, EPOLL_CTL_MOD, server, &event);
		} else if (got == SOME) {
			break;
		}
	printf("%d of %d\n", got, SOME);
	printf("then %d,", is_told(event.data.u64, 0));
	send_one('x', 0, 0);
	settle();
	printf(" later %d,", is_told(event.data.u64, 0));
	epoll_ctl(epoll, EPOLL_CTL_DEL, server, NULL);
	printf(" out %d\n", is_told(event.data.u64, 0));
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
