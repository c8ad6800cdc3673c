/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Batched replies of a thread that computes from then on, with no prefetched
 * datagrams left:
 *
 *	stale_reply_flush CASE
 *
 * One thread answers all datagrams of its lane except the last two, and never
 * calls anything again. Its replies have to arrive all the same, because the
 * other thread checks: "receives": it waits in receives. "polls": it waits in
 * poll. "busy": it has a datagram of its own each time, and then stops, too.
 * "laneless": it does nothing, and a third thread starts to receive. Prints the
 * number of replies that arrived.
 */
#define _GNU_SOURCE
#include "lane_owners.h"

#define LANE_DATAGRAMS 20
#define MORE_DATAGRAMS 48
#define TIMEOUT_MS 100000

static const char *what;
static _Atomic unsigned done[WORKERS];

static int is_case(const char *it)
{
	return !strcmp(what, it);
}

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	unsigned last = nth ? MORE_DATAGRAMS - 8 : LANE_DATAGRAMS,
		 unanswered = nth ? 0 : 2;

	if (done[nth] + 1 + unanswered <= last &&
	    sendto(server, payload, sizeof(*payload), 0, (void *)from,
		   sizeof(*from)) != sizeof(*payload)) {
		perror("sendto");
		exit(1);
	}
	if (done[nth] + 1 < last) {
		done[nth]++;
		return;
	}
	/* It leaves by itself. */
	if (nth)
		close(-1);
	done[nth]++;
	for (;;)
		raw_sleep();
}

static void *laneless_receiver(void *unused)
{
	char bytes[64];

	(void)unused;
	recv(server, bytes, sizeof(bytes), 0);
	return NULL;
}

static void *polling_receiver(void *unused)
{
	struct pollfd at = { .fd = server, .events = POLLIN };

	(void)unused;
	for (;;)
		poll(&at, 1, -1);
	return NULL;
}

static unsigned receive_replies(unsigned want)
{
	struct pollfd at[FLOWS];
	struct payload payload;
	unsigned arrived = 0;
	int i;

	for (i = 0; i < FLOWS; i++)
		at[i] = (struct pollfd){ .fd = clients[i], .events = POLLIN };
	while (arrived < want && poll(at, FLOWS, TIMEOUT_MS) > 0)
		for (i = 0; i < FLOWS; i++)
			if (at[i].revents &&
			    recv(clients[i], &payload, sizeof(payload), 0) ==
				    sizeof(payload))
				arrived++;
	return arrived;
}

int main(int argc, char **argv)
{
	unsigned want = LANE_DATAGRAMS - 2;
	pthread_t thread;
	int i;

	what = argc > 1 ? argv[1] : "";
	start_and_park();
	pin_to_this_cpu();
	for (i = 0; i < LANE_DATAGRAMS; i++)
		send_one('x', nth_flow(0, i), i);
	wait_for_delivery();
	park[0] = 0;
	while (done[0] < LANE_DATAGRAMS)
		raw_sleep();
	if (is_case("busy")) {
		for (i = 0; i < MORE_DATAGRAMS; i++)
			send_one('x', nth_flow(1, i), i);
		wait_for_delivery();
		want += MORE_DATAGRAMS - 8;
	}
	if (is_case("receives") || is_case("busy"))
		park[1] = 0;
	if (is_case("laneless"))
		pthread_create(&thread, NULL, laneless_receiver, NULL);
	if (is_case("polls"))
		pthread_create(&thread, NULL, polling_receiver, NULL);
	printf("replies %u\n", receive_replies(want));
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
