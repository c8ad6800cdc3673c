/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Prefetched datagrams:
 *
 *	prefetch CASE
 *
 * Two threads (or, for "kill", two processes) receive until the library has seen
 * each return often. Then they park, many datagrams are sent, and each receives
 * some of them and parks again, with the rest of a prefetch. "calls": the main
 * thread receives the rest by every kind of call, and polls before each.
 * "fork": a child does. "fallback": the socket becomes plain, more datagrams
 * arrive, and the main thread receives all of them. "recv-only": the same, by
 * receives alone. "kill": the receivers are killed. "handler": signal handlers
 * receive during receives. Prints the number of datagrams, and how many were
 * reordered or duplicated: the same with the library as without.
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
#define RECEIVES_PER_WORKER 12
#define BURSTS 10

struct payload {
	char kind;
	unsigned char flow;
	unsigned short number;
};

/* State that threads and processes share. */
static struct state {
	_Atomic unsigned received[WORKERS], total, parked, twice, disorder;
	_Atomic int hold, more[WORKERS], stop;
	_Atomic unsigned char seen[FLOWS][65536];
} * shared;

static int server, clients[FLOWS];
static unsigned short sent[FLOWS], last[FLOWS];
static struct sockaddr_in address;

static void mark_seen(const struct payload *payload)
{
	if (shared->seen[payload->flow][payload->number]++)
		shared->twice++;
}

static void receive_one(unsigned nth, int flags)
{
	struct payload payload;
	struct sockaddr_in from;
	socklen_t len = sizeof(from);
	ssize_t got = recvfrom(server, &payload, sizeof(payload), flags,
			       (void *)&from, &len);

	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got != sizeof(payload) || len != sizeof(from) ||
	    from.sin_family != AF_INET || !from.sin_port) {
		perror("recvfrom");
		exit(1);
	}
	mark_seen(&payload);
	shared->received[nth]++;
	shared->total++;
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	while (!shared->stop) {
		receive_one(nth, 0);
		if (!shared->hold)
			continue;
		shared->parked++;
		while (shared->hold && !shared->more[nth] && !shared->stop)
			usleep(200);
		while (shared->more[nth] > 0) {
			receive_one(nth, 0);
			shared->more[nth]--;
		}
		shared->parked--;
		/* Until the end. */
		while (shared->hold && !shared->stop)
			usleep(200);
	}
	return NULL;
}

static void send_one(int flow)
{
	struct payload payload = { 'x', flow, sent[flow]++ };

	if (sendto(clients[flow], &payload, sizeof(payload), 0,
		   (void *)&address, sizeof(address)) != sizeof(payload))
		perror("sendto");
}

static void burst(void)
{
	unsigned want = shared->total + FLOWS;

	for (int i = 0; i < FLOWS; i++)
		send_one(i);
	while (shared->total < want)
		usleep(50);
}

/* A thread receives the datagrams of a flow in order. */
static void check(const struct payload *payload, ssize_t len)
{
	if (len != sizeof(*payload)) {
		perror("recv");
		exit(1);
	}
	mark_seen(payload);
	if (last[payload->flow] && payload->number < last[payload->flow])
		shared->disorder++;
	last[payload->flow] = payload->number + 1;
}

/* Receives by call number `how`; returns the number of datagrams. */
static int receive_by(unsigned how, int epoll)
{
	struct payload payload[3], peeked;
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
			shared->disorder++;
		return 0;
	}
	if (poll(&at, 1, 0) != 1 || at.revents != POLLIN ||
	    epoll_wait(epoll, &event, 1, 0) != 1 || event.events != EPOLLIN ||
	    ioctl(server, FIONREAD, &size) || size != sizeof(peeked))
		shared->disorder++;
	/* The datagram that was peeked at last comes next. */
	recv(server, &peeked, sizeof(peeked), MSG_PEEK | MSG_DONTWAIT);
	memset(payload, 0, sizeof(payload));
	switch (how % 6) {
	case 0:
		check(payload,
		      recv(server, payload, sizeof(*payload), MSG_DONTWAIT));
		break;
	case 1:
		check(payload, recvfrom(server, payload, sizeof(*payload), 0,
					(void *)from, &len));
		break;
	case 2:
		check(payload, read(server, payload, sizeof(*payload)));
		break;
	case 3: {
		/*
		 * A part of the datagram, with MSG_TRUNC and the whole length.
		 */
		char *to = (char *)payload;
		struct iovec part = { to, 2 };
		struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

		if (recvmsg(server, &message, MSG_PEEK) != 2 ||
		    message.msg_flags != MSG_TRUNC)
			shared->disorder++;
		if (recv(server, to, 2, MSG_TRUNC) != sizeof(*payload) ||
		    memcmp(to, &peeked, 2) || to[2])
			shared->disorder++;
		*payload = peeked;
		check(payload, sizeof(*payload));
		break;
	}
	case 4: {
		struct iovec parts[2] = { { payload, 1 },
					  { (char *)payload + 1, 9 } };
		struct msghdr message = { .msg_name = from,
					  .msg_namelen = sizeof(from[0]),
					  .msg_iov = parts,
					  .msg_iovlen = 2 };

		check(payload, recvmsg(server, &message, 0));
		if (message.msg_flags || message.msg_namelen != sizeof(from[0]))
			shared->disorder++;
		break;
	}
	default: {
		struct mmsghdr many[3] = { 0 };
		struct iovec parts[3];

		for (int i = 0; i < 3; i++) {
			parts[i] =
				(struct iovec){ &payload[i], sizeof(*payload) };
			many[i].msg_hdr.msg_iov = &parts[i];
			many[i].msg_hdr.msg_iovlen = 1;
		}
		got = recvmmsg(server, many, 3, MSG_DONTWAIT, NULL);
		for (int i = 0; i < got; i++)
			check(&payload[i], many[i].msg_len);
		if (memcmp(payload, &peeked, sizeof(peeked)))
			shared->disorder++;
		return got;
	}
	}
	if (memcmp(payload, &peeked, sizeof(peeked)))
		shared->disorder++;
	return 1;
}

static unsigned receive_all(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epoll = epoll_create1(EPOLL_CLOEXEC), got;
	unsigned count = 0, how = 0;

	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	while ((got = receive_by(how++, epoll)) > 0)
		count += got;
	close(epoll);
	return count;
}

/* Receives all, without a poll before. */
static unsigned receive_without_poll(void)
{
	struct payload payload;
	unsigned count = 0;
	ssize_t len;

	while ((len = recv(server, &payload, sizeof(payload), MSG_DONTWAIT)) >=
	       0) {
		check(&payload, len);
		count++;
	}
	return count;
}

static void handle(int signal)
{
	int saved = errno;

	(void)signal;
	receive_one(0, MSG_DONTWAIT);
	errno = saved;
}

static void run_handlers(pthread_t *threads)
{
	struct sigaction action = { .sa_handler = handle,
				    .sa_flags = SA_RESTART };
	unsigned before = shared->total, want = before;

	sigaction(SIGUSR1, &action, NULL);
	for (int round = 0; round < 300; round++) {
		while (want - shared->total > 100)
			usleep(20);
		for (int i = 0; i < FLOWS; i++)
			send_one(i);
		want += FLOWS;
		for (int i = 0; i < WORKERS; i++)
			pthread_kill(threads[i], SIGUSR1);
	}
	while (shared->total < want)
		usleep(50);
	printf("received %u\n", shared->total - before);
}

int main(int argc, char **argv)
{
	pthread_t threads[WORKERS];
	pid_t children[WORKERS] = { 0 }, pid;
	unsigned before, ready, rest = 0;
	int i, round, processes, recv_only;

	if (argc < 2)
		return 2;
	processes = !strcmp(argv[1], "kill");
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		return 1;
	server = loopback_server(0, &address);
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
			ready += shared->received[i] >= 50;
	} while (ready < WORKERS);
	if (!strcmp(argv[1], "handler")) {
		run_handlers(threads);
		goto end;
	}
	/*
	 * Each receives one and parks. Then many arrive, and each receives
	 * some.
	 */
	pin_to_this_cpu();
	shared->hold = 1;
	before = shared->total;
	/* In flight are never more than a queue has room for. */
	for (i = 0; shared->parked < WORKERS;) {
		if (i - (int)(shared->total - before) < 2 * FLOWS)
			send_one(i++ % FLOWS);
		usleep(2000);
	}
	wait_for_delivery();
	rest = receive_all();
	before = shared->total;
	for (round = 0; round < BURSTS; round++)
		for (i = 0; i < FLOWS; i++)
			send_one(i);
	wait_for_delivery();
	/* Which of them each gets does not matter; there are enough. */
	for (i = 0; i < WORKERS; i++)
		shared->more[i] = RECEIVES_PER_WORKER;
	while (shared->parked)
		usleep(50);
	printf("received %u\n", shared->total - before);
	recv_only = !strcmp(argv[1], "recv-only");
	if (recv_only || !strcmp(argv[1], "fallback")) {
		i = 1;
		printf("option %d\n", setsockopt(server, SOL_SOCKET,
						 SO_RXQ_OVFL, &i, sizeof(i)));
		for (round = 0; round < 4; round++)
			for (i = 0; i < FLOWS; i++)
				send_one(i);
		wait_for_delivery();
	}
	for (i = 0; i < WORKERS && processes; i++) {
		kill(children[i], SIGKILL);
		waitpid(children[i], NULL, 0);
	}
	fflush(stdout);
	pid = strcmp(argv[1], "fork") ? 0 : fork();
	if (!pid)
		printf("rest %u\n",
		       recv_only ? receive_without_poll() : receive_all());
	if (!strcmp(argv[1], "fork")) {
		if (!pid) {
			fflush(stdout);
			_exit(0);
		}
		waitpid(pid, NULL, 0);
		printf("then %u\n", receive_all());
	}
end:
	shared->stop = 1;
	shared->hold = 0;
	printf("twice %u, out of order %u\n", shared->twice, shared->disorder);
	rest = 0;
	for (i = 0; i < FLOWS; i++)
		for (round = 0; round < sent[i]; round++)
			rest += !shared->seen[i][round];
	printf("lost %u\n", rest);
	fflush(stdout);
	_exit(0);
}
