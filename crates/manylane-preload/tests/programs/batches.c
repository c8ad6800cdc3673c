/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What becomes of datagrams that were taken ahead:
 *
 *	batches CASE
 *
 * Two threads (or, for "die", two processes) receive until each has come back
 * often. Then they park, much is sent, and each receives some of it and parks
 * again, with the rest of what one call took. CASE: "calls": the main thread
 * takes the rest by all calls, and looks before each; "fork": a child does;
 * "fall": the socket becomes plain, more comes, and the main thread takes all;
 * "blunt": the same, by receives alone;
 * "die": the receivers are killed; "handler": signal handlers receive in the
 * midst of receives. Prints how many there were, and what was out of order or
 * there twice: the same with the library as without.
 */
#define _GNU_SOURCE
#include "loopback.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define FLOWS 16
#define WORKERS 2
#define EACH 12
#define SOME 10

struct word {
	char kind;
	unsigned char flow;
	unsigned short number;
};

/* What threads and processes share. */
static struct state {
	_Atomic unsigned received[WORKERS], total, parked, twice, disorder;
	_Atomic int hold, more[WORKERS], stop;
	_Atomic unsigned char seen[FLOWS][65536];
} * all;

static int server, clients[FLOWS];
static unsigned short sent[FLOWS], last[FLOWS];
static struct sockaddr_in address;

static void note(const struct word *word)
{
	if (all->seen[word->flow][word->number]++)
		all->twice++;
}

static void one(unsigned nth, int flags)
{
	struct word word;
	struct sockaddr_in from;
	socklen_t len = sizeof(from);
	ssize_t got = recvfrom(server, &word, sizeof(word), flags,
			       (void *)&from, &len);

	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got != sizeof(word) || len != sizeof(from) ||
	    from.sin_family != AF_INET || !from.sin_port) {
		perror("recvfrom");
		exit(1);
	}
	note(&word);
	all->received[nth]++;
	all->total++;
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	while (!all->stop) {
		one(nth, 0);
		if (!all->hold)
			continue;
		all->parked++;
		while (all->hold && !all->more[nth] && !all->stop)
			usleep(200);
		while (all->more[nth] > 0) {
			one(nth, 0);
			all->more[nth]--;
		}
		all->parked--;
		/* For good. */
		while (all->hold && !all->stop)
			usleep(200);
	}
	return NULL;
}

static void send_one(int flow)
{
	struct word word = { 'x', flow, sent[flow]++ };

	if (sendto(clients[flow], &word, sizeof(word), 0, (void *)&address,
		   sizeof(address)) != sizeof(word))
		perror("sendto");
}

static void burst(void)
{
	unsigned want = all->total + FLOWS;

	for (int i = 0; i < FLOWS; i++)
		send_one(i);
	while (all->total < want)
		usleep(50);
}

/* What one thread gets of a flow is newer than what it got before. */
static void check(const struct word *word, ssize_t len)
{
	if (len != sizeof(*word)) {
		perror("recv");
		exit(1);
	}
	note(word);
	if (last[word->flow] && word->number < last[word->flow])
		all->disorder++;
	last[word->flow] = word->number + 1;
}

/* Takes one by some call: how many there were. */
static int take(unsigned how, int epoll)
{
	struct word word[3], peeked;
	struct pollfd at = { .fd = server, .events = POLLIN };
	struct epoll_event event;
	struct sockaddr_in from[3];
	socklen_t len = sizeof(from[0]);
	int size = -1, got;
	ssize_t first =
		recv(server, &peeked, sizeof(peeked), MSG_PEEK | MSG_DONTWAIT);

	if (first < 0) {
		if (errno != EAGAIN || poll(&at, 1, 0) ||
		    epoll_wait(epoll, &event, 1, 0))
			all->disorder++;
		return 0;
	}
	if (poll(&at, 1, 0) != 1 || at.revents != POLLIN ||
	    epoll_wait(epoll, &event, 1, 0) != 1 || event.events != EPOLLIN ||
	    ioctl(server, FIONREAD, &size) || size != sizeof(peeked))
		all->disorder++;
	/* What was looked at last comes next. */
	recv(server, &peeked, sizeof(peeked), MSG_PEEK | MSG_DONTWAIT);
	memset(word, 0, sizeof(word));
	switch (how % 6) {
	case 0:
		check(word, recv(server, word, sizeof(*word), MSG_DONTWAIT));
		break;
	case 1:
		check(word, recvfrom(server, word, sizeof(*word), 0,
				     (void *)from, &len));
		break;
	case 2:
		check(word, read(server, word, sizeof(*word)));
		break;
	case 3: {
		/* A part, and how long it is; that it is one is told, too. */
		char *to = (char *)word;
		struct iovec part = { to, 2 };
		struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

		if (recvmsg(server, &message, MSG_PEEK) != 2 ||
		    message.msg_flags != MSG_TRUNC)
			all->disorder++;
		if (recv(server, to, 2, MSG_TRUNC) != sizeof(*word) ||
		    memcmp(to, &peeked, 2) || to[2])
			all->disorder++;
		*word = peeked;
		check(word, sizeof(*word));
		break;
	}
	case 4: {
		struct iovec parts[2] = { { word, 1 },
					  { (char *)word + 1, 9 } };
		struct msghdr message = { .msg_name = from,
					  .msg_namelen = sizeof(from[0]),
					  .msg_iov = parts,
					  .msg_iovlen = 2 };

		check(word, recvmsg(server, &message, 0));
		if (message.msg_flags || message.msg_namelen != sizeof(from[0]))
			all->disorder++;
		break;
	}
	default: {
		struct mmsghdr many[3] = { 0 };
		struct iovec parts[3];

		for (int i = 0; i < 3; i++) {
			parts[i] = (struct iovec){ &word[i], sizeof(*word) };
			many[i].msg_hdr.msg_iov = &parts[i];
			many[i].msg_hdr.msg_iovlen = 1;
		}
		got = recvmmsg(server, many, 3, MSG_DONTWAIT, NULL);
		for (int i = 0; i < got; i++)
			check(&word[i], many[i].msg_len);
		if (memcmp(word, &peeked, sizeof(peeked)))
			all->disorder++;
		return got;
	}
	}
	if (memcmp(word, &peeked, sizeof(peeked)))
		all->disorder++;
	return 1;
}

static unsigned take_all(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(EPOLL_CLOEXEC), got;
	unsigned count = 0, how = 0;

	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	while ((got = take(how++, epoll)) > 0)
		count += got;
	close(epoll);
	return count;
}

/* Takes all by nothing but receives, which look at nothing before. */
static unsigned take_bluntly(void)
{
	struct word word;
	unsigned count = 0;
	ssize_t len;

	while ((len = recv(server, &word, sizeof(word), MSG_DONTWAIT)) >= 0) {
		check(&word, len);
		count++;
	}
	return count;
}

static void handle(int signal)
{
	int saved = errno;

	(void)signal;
	one(0, MSG_DONTWAIT);
	errno = saved;
}

static void handlers(pthread_t *threads)
{
	struct sigaction action = { .sa_handler = handle,
				    .sa_flags = SA_RESTART };
	unsigned before = all->total, want = before;

	sigaction(SIGUSR1, &action, NULL);
	for (int turn = 0; turn < 300; turn++) {
		while (want - all->total > 100)
			usleep(20);
		for (int i = 0; i < FLOWS; i++)
			send_one(i);
		want += FLOWS;
		for (int i = 0; i < WORKERS; i++)
			pthread_kill(threads[i], SIGUSR1);
	}
	while (all->total < want)
		usleep(50);
	printf("received %u\n", all->total - before);
}

int main(int argc, char **argv)
{
	pthread_t threads[WORKERS];
	pid_t children[WORKERS] = { 0 }, pid;
	socklen_t len = sizeof(address);
	unsigned before, ready, rest = 0;
	int i, turn, processes, blunt;

	if (argc < 2)
		return 2;
	processes = !strcmp(argv[1], "die");
	/* Nobody outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	server = socket(AF_INET, SOCK_DGRAM, 0);
	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (all == MAP_FAILED ||
	    bind(server, (void *)&address, sizeof(address)) ||
	    getsockname(server, (void *)&address, &len))
		return 1;
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < WORKERS; i++) {
		if (!processes) {
			pthread_create(&threads[i], NULL, worker,
				       (void *)(unsigned long)i);
			continue;
		}
		children[i] = fork();
		if (!children[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			worker((void *)(unsigned long)i);
			_exit(0);
		}
	}
	do {
		burst();
		for (i = 0, ready = 0; i < WORKERS; i++)
			ready += all->received[i] >= 50;
	} while (ready < WORKERS);
	if (!strcmp(argv[1], "handler")) {
		handlers(threads);
		goto end;
	}
	/* Each takes one and parks; then much comes, and each takes some. */
	stay_here();
	all->hold = 1;
	for (i = 0; all->parked < WORKERS; i++) {
		send_one(i % FLOWS);
		usleep(2000);
	}
	settle();
	rest = take_all();
	before = all->total;
	for (turn = 0; turn < SOME; turn++)
		for (i = 0; i < FLOWS; i++)
			send_one(i);
	/* How many of them each has is nobody's business, but there are enough. */
	for (i = 0; i < WORKERS; i++)
		all->more[i] = EACH;
	while (all->parked)
		usleep(50);
	printf("taken %u\n", all->total - before);
	blunt = !strcmp(argv[1], "blunt");
	if (blunt || !strcmp(argv[1], "fall")) {
		i = 1;
		printf("option %d\n", setsockopt(server, SOL_SOCKET,
						 SO_RXQ_OVFL, &i, sizeof(i)));
		for (turn = 0; turn < 4; turn++)
			for (i = 0; i < FLOWS; i++)
				send_one(i);
		settle();
	}
	for (i = 0; i < WORKERS && processes; i++) {
		kill(children[i], SIGKILL);
		waitpid(children[i], NULL, 0);
	}
	fflush(stdout);
	pid = strcmp(argv[1], "fork") ? 0 : fork();
	if (!pid)
		printf("rest %u\n", blunt ? take_bluntly() : take_all());
	if (!strcmp(argv[1], "fork")) {
		if (!pid) {
			fflush(stdout);
			_exit(0);
		}
		waitpid(pid, NULL, 0);
		printf("then %u\n", take_all());
	}
end:
	all->stop = 1;
	all->hold = 0;
	printf("twice %u, out of order %u\n", all->twice, all->disorder);
	rest = 0;
	for (i = 0; i < FLOWS; i++)
		for (turn = 0; turn < sent[i]; turn++)
			rest += !all->seen[i][turn];
	printf("lost %u\n", rest);
	fflush(stdout);
	_exit(0);
}
