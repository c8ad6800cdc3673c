/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What two threads get that come late, each with a lane:
 *
 *	overloads
 *
 * Both lanes get more than half of what they have room for, and less than
 * three quarters. Then one thread after the other takes what its own lane has,
 * up to the last. Prints of each how many were sent to it and received, how
 * many it missed at once, how often it missed some, and how many are a quarter
 * of a queue.
 */
#define _GNU_SOURCE
#include "shares.h"

static unsigned limit, least, count;
static _Atomic unsigned got[WORKERS], missed[WORKERS], gaps[WORKERS];
static _Atomic unsigned others, next[WORKERS];

static unsigned memory(int fd, int which)
{
	unsigned words[9];
	socklen_t len = sizeof(words);

	if (syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_MEMINFO, words, &len)) {
		perror("SO_MEMINFO");
		exit(1);
	}
	return words[which];
}

static void handle(unsigned nth, const struct word *word,
		   const struct sockaddr_in *from)
{
	(void)from;
	if (owner[word->flow] != nth)
		others++;
	if (word->number != next[nth]) {
		gaps[nth]++;
		missed[nth] += word->number - next[nth];
	}
	next[nth] = word->number + 1;
	got[nth]++;
	/* The other one's lane is not its business. */
	if (word->number + 1u == count)
		park[nth] = 1;
}

/* What a datagram costs, seen on a socket of its own. */
static void measure(void)
{
	struct word word = { .kind = 'm' };
	struct sockaddr_in at;
	int fd = loopback_server(0, &at);

	limit = memory(fd, 1);
	sendto(clients[0], &word, sizeof(word), 0, (void *)&at, sizeof(at));
	settle();
	least = memory(fd, 0);
	close(fd);
}

int main(void)
{
	unsigned nth, i;

	start_and_park();
	stay_here();
	measure();
	count = limit / 8 * 5 / least;
	for (i = 0; i < count; i++)
		for (nth = 0; nth < WORKERS; nth++)
			send_one('x', flow_of(nth, i), i);
	settle();
	for (nth = 0; nth < WORKERS; nth++) {
		parked[nth] = 0;
		park[nth] = 0;
		while (next[nth] < count || !parked[nth])
			nap();
	}
	for (nth = 0; nth < WORKERS; nth++)
		printf("sent %u received %u missed %u gaps %u quarter %u\n",
		       count, got[nth], missed[nth], gaps[nth],
		       limit / 4 / least);
	printf("others %u\n", others);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
