/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Replies that were kept to be sent with others, by a thread that computes
 * from then on, with nothing left to hand out to anybody:
 *
 *	looks CASE
 *
 * One thread answers all that its lane had but the last two, and never calls
 * anything again. Its answers are to arrive all the same, by the doing of the
 * other one, which CASE says: "receives": it waits for what comes; "polls": so
 * it does, by poll; "busy": it has something of its own each time, and stops,
 * too; "guest": it does nothing, and a third thread comes to receive. Prints
 * how many answers came.
 */
#define _GNU_SOURCE
#include "shares.h"

#define SOME 20
#define MANY 48
/* Milliseconds. */
#define PATIENCE 30000

static const char *what;
static _Atomic unsigned done[WORKERS];

static int is(const char *it)
{
	return !strcmp(what, it);
}

static void handle(unsigned nth, const struct word *word,
		   const struct sockaddr_in *from)
{
	unsigned last = nth ? MANY - 8 : SOME, unanswered = nth ? 0 : 2;

	if (done[nth] + 1 + unanswered <= last &&
	    sendto(server, word, sizeof(*word), 0, (void *)from,
		   sizeof(*from)) != sizeof(*word)) {
		perror("sendto");
		exit(1);
	}
	if (done[nth] + 1 < last) {
		done[nth]++;
		return;
	}
	/* Its own leave. */
	if (nth)
		close(-1);
	done[nth]++;
	for (;;)
		nap();
}

static void *guest(void *unused)
{
	char bytes[64];

	(void)unused;
	recv(server, bytes, sizeof(bytes), 0);
	return NULL;
}

static void *polls(void *unused)
{
	struct pollfd at = { .fd = server, .events = POLLIN };

	(void)unused;
	for (;;)
		poll(&at, 1, -1);
	return NULL;
}

static unsigned take(unsigned want)
{
	struct pollfd at[FLOWS];
	struct word word;
	unsigned came = 0;
	int i;

	for (i = 0; i < FLOWS; i++)
		at[i] = (struct pollfd){ .fd = clients[i], .events = POLLIN };
	while (came < want && poll(at, FLOWS, PATIENCE) > 0)
		for (i = 0; i < FLOWS; i++)
			if (at[i].revents &&
			    recv(clients[i], &word, sizeof(word), 0) ==
				    sizeof(word))
				came++;
	return came;
}

int main(int argc, char **argv)
{
	unsigned want = SOME - 2;
	pthread_t thread;
	int i;

	what = argc > 1 ? argv[1] : "";
	start_and_park();
	stay_here();
	for (i = 0; i < SOME; i++)
		send_one('x', flow_of(0, i), i);
	settle();
	park[0] = 0;
	while (done[0] < SOME)
		nap();
	if (is("busy")) {
		for (i = 0; i < MANY; i++)
			send_one('x', flow_of(1, i), i);
		settle();
		want += MANY - 8;
	}
	if (is("receives") || is("busy"))
		park[1] = 0;
	if (is("guest"))
		pthread_create(&thread, NULL, guest, NULL);
	if (is("polls"))
		pthread_create(&thread, NULL, polls, NULL);
	printf("answers %u\n", take(want));
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
