/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Servers of every pattern, on one UDP socket each, with their own client:
 *
 *	server_patterns PATTERN RECEIVERS DATAGRAMS
 *
 * The client sends numbered datagrams from 16 ports, at most 32 of them in
 * flight, and slowly until each receiver has got some. Each receiver records
 * what it receives. Then as many "stop" messages follow as there are receivers;
 * a receiver that gets one ends. The output is the same in every run: how many
 * numbers were received once, never, more than once.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define FLOWS 16
#define WINDOW 32
#define BURST 8
#define DATAGRAMS_EACH 3
#define WAITS_FOR_OTHERS 1000
/* Waits of at least 100 us: a receiver may get no CPU time for long. */
#define WAITS_MAX 400000
#define STOP 0xffffffffu
#define DATAGRAMS_MAX 200000

struct state {
	_Atomic unsigned started;
	_Atomic unsigned received;
	_Atomic unsigned stopped;
	_Atomic unsigned wrong;
	_Atomic unsigned got[64];
	_Atomic unsigned waits_for_others;
	_Atomic unsigned char seen[DATAGRAMS_MAX];
};

static struct state *state;
static int server, shared_epoll = -1;
static unsigned receivers, datagrams;
static const char *pattern;
static pid_t children[64];
static sem_t work, done;
static _Atomic int finished;
static struct sockaddr_in address;
static __thread unsigned self;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static int has_each_received(void)
{
	unsigned nth;

	for (nth = 0; nth < receivers; nth++) {
		if (state->got[nth] < DATAGRAMS_EACH)
			return 0;
	}
	return 1;
}

/*
 * Of the threads that are woken for one datagram, one gets it, and the others
 * may go on sleeping as long as another one is always quicker. So a receiver
 * that has got some waits while others have not; with a bound, because in some
 * patterns not every thread receives.
 */
static void let_others_receive(void)
{
	if (state->got[self] < DATAGRAMS_EACH ||
	    state->waits_for_others >= WAITS_FOR_OTHERS || has_each_received())
		return;
	state->waits_for_others++;
	usleep(500);
}

/* Records a datagram; true if the receiver is to end. */
static int record(const unsigned char *data, ssize_t len)
{
	unsigned number;

	if (len != 8) {
		state->wrong++;
		return 0;
	}
	memcpy(&number, data, 4);
	if (number == STOP) {
		state->stopped++;
		return 1;
	}
	if (number >= datagrams)
		state->wrong++;
	else
		state->seen[number]++;
	state->got[self]++;
	state->received++;
	let_others_receive();
	return 0;
}

/*
 * Receives all queued datagrams; a receiver that has got "stop" receives no
 * more.
 */
static int receive_queued(int fd, int once)
{
	unsigned char data[64];

	for (;;) {
		struct sockaddr_in from;
		socklen_t fromlen = sizeof(from);
		ssize_t len = recvfrom(fd, data, sizeof(data), 0, (void *)&from,
				       &fromlen);

		if (len < 0) {
			if (errno == EAGAIN)
				return 0;
			if (errno == EINTR)
				continue;
			fail("recvfrom");
		}
		if (fromlen != sizeof(from) || from.sin_port == 0)
			state->wrong++;
		if (record(data, len))
			return 1;
		if (once)
			return 0;
	}
}

static void blocking(void)
{
	while (!receive_queued(server, 1))
		;
}

/* Ends by itself after some datagrams, except the first one, which stays. */
static void leave_early(unsigned nth)
{
	unsigned left = 50 + nth * 20;

	while (left--) {
		if (receive_queued(server, 1))
			return;
		if (nth == 0)
			left++;
	}
}

static void by_messages(void)
{
	struct mmsghdr messages[8];
	struct iovec parts[8];
	unsigned char data[8][64];
	int i, got, stop = 0;

	while (!stop) {
		for (i = 0; i < 8; i++) {
			parts[i] = (struct iovec){ data[i], sizeof(data[i]) };
			memset(&messages[i], 0, sizeof(messages[i]));
			messages[i].msg_hdr.msg_iov = &parts[i];
			messages[i].msg_hdr.msg_iovlen = 1;
		}
		got = recvmmsg(server, messages, 8, MSG_WAITFORONE, NULL);
		if (got < 0)
			fail("recvmmsg");
		for (i = 0; i < got; i++) {
			if (!record(data[i], messages[i].msg_len))
				continue;
			/*
			 * A second "stop" is sent again, for one of the
			 * remaining receivers.
			 */
			if (stop++) {
				state->stopped--;
				sendto(server, data[i], 8, 0, (void *)&address,
				       sizeof(address));
			}
		}
	}
}

static void by_epoll(unsigned flags)
{
	int epoll =
		shared_epoll >= 0 ? shared_epoll : epoll_create1(EPOLL_CLOEXEC);
	int fd = shared_epoll >= 0 ? server : dup(server);
	struct epoll_event event = { .events = EPOLLIN | flags,
				     .data.u64 = 0x1122334455667788 };

	if (shared_epoll < 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
		fail("epoll_ctl");
	for (;;) {
		struct epoll_event got[4];
		int count = epoll_wait(epoll, got, 4, -1);

		if (count < 0 && errno == EINTR)
			continue;
		if (count != 1 || got[0].data.u64 != 0x1122334455667788 ||
		    !(got[0].events & EPOLLIN))
			state->wrong++;
		if (receive_queued(fd, 0))
			break;
		if ((flags & EPOLLONESHOT) &&
		    epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event))
			fail("epoll_ctl MOD");
	}
	if (shared_epoll < 0) {
		/*
		 * Others may sleep while this one was woken for their datagram.
		 */
		if (epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL))
			fail("epoll_ctl DEL");
		close(epoll);
		close(fd);
	}
}

static void by_poll(void)
{
	struct pollfd at = { .fd = server, .events = POLLIN };

	do {
		at.revents = 0;
		if (poll(&at, 1, -1) != 1 || !(at.revents & POLLIN) ||
		    at.fd != server)
			state->wrong++;
	} while (!receive_queued(server, 0));
}

static void by_select(void)
{
	fd_set set;

	do {
		FD_ZERO(&set);
		FD_SET(server, &set);
		if (select(server + 1, &set, NULL, NULL, NULL) != 1 ||
		    !FD_ISSET(server, &set))
			state->wrong++;
	} while (!receive_queued(server, 0));
}

/* One thread waits, and hands datagrams to a free one of the others. */
static void by_dispatcher(unsigned nth)
{
	struct pollfd at = { .fd = server, .events = POLLIN };
	unsigned words = receivers;

	if (nth == 0) {
		while (state->stopped < receivers) {
			if (poll(&at, 1, -1) != 1)
				state->wrong++;
			sem_post(&work);
			sem_wait(&done);
		}
		finished = 1;
		for (nth = 1; nth < receivers; nth++)
			sem_post(&work);
		return;
	}
	for (;;) {
		sem_wait(&work);
		if (finished)
			return;
		while (words-- && receive_queued(server, 0))
			;
		words = receivers;
		sem_post(&done);
	}
}

static void *receiver(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	self = nth;
	state->started++;
	if (!strcmp(pattern, "leave"))
		leave_early(nth);
	else if (!strcmp(pattern, "messages"))
		by_messages();
	else if (!strcmp(pattern, "level"))
		by_epoll(0);
	else if (!strcmp(pattern, "edge"))
		by_epoll(EPOLLET);
	else if (!strcmp(pattern, "exclusive"))
		by_epoll(EPOLLEXCLUSIVE);
	else if (!strcmp(pattern, "oneshot"))
		by_epoll(EPOLLONESHOT);
	else if (!strcmp(pattern, "one-epoll"))
		by_epoll(0);
	else if (!strcmp(pattern, "poll"))
		by_poll();
	else if (!strcmp(pattern, "select"))
		by_select();
	else if (!strcmp(pattern, "dispatch"))
		by_dispatcher(nth);
	else
		blocking();
	return NULL;
}

static void send_to(int from, unsigned number)
{
	unsigned char data[8] = { 0 };

	memcpy(data, &number, 4);
	if (sendto(from, data, sizeof(data), 0, (void *)&address,
		   sizeof(address)) != 8)
		fail("sendto");
}

/*
 * Waits until `count` were received, or none for long: missing ones are then
 * lost.
 */
static void wait_for(unsigned count)
{
	unsigned waited, before, now = 0;

	for (waited = 0; now < count && waited < WAITS_MAX; waited++) {
		before = now;
		now = state->received;
		if (now != before)
			waited = 0;
		if (now < count)
			usleep(100);
	}
}

/* Sends slowly: at times, all receivers are asleep. */
static void send_slowly(unsigned sent)
{
	if (sent >= datagrams / 2 || sent % BURST || has_each_received())
		return;
	wait_for(sent);
	usleep(1000);
}

static void client(void)
{
	int ports[FLOWS];
	unsigned i;

	while (state->started < receivers)
		usleep(100);
	for (i = 0; i < FLOWS; i++)
		ports[i] = socket(AF_INET, SOCK_DGRAM, 0);
	for (i = 0; i < datagrams; i++) {
		if (i >= WINDOW)
			wait_for(i - WINDOW + 1);
		send_slowly(i);
		if (!strcmp(pattern, "connect") && i == datagrams / 2) {
			/* All following datagrams are from the peer. */
			struct sockaddr_in peer = { .sin_family = AF_INET };
			socklen_t len = sizeof(peer);

			getsockname(ports[0], (void *)&peer, &len);
			peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
			if (connect(server, (void *)&peer, sizeof(peer)))
				fail("connect");
		}
		if (!strcmp(pattern, "kill") && i == datagrams / 2) {
			/*
			 * When all have been received, a missing child makes no
			 * difference.
			 */
			while (state->received < i)
				usleep(100);
			kill(children[--receivers], SIGKILL);
			waitpid(children[receivers], NULL, 0);
		}
		send_to(ports[!strcmp(pattern, "connect") &&
					      i >= datagrams / 2 ?
				      0 :
				      i % FLOWS],
			i);
	}
	wait_for(datagrams);
	for (i = 0; i < receivers; i++)
		send_to(ports[!strcmp(pattern, "connect") ? 0 : i % FLOWS],
			STOP);
	for (i = 0; i < FLOWS; i++)
		close(ports[i]);
}

int main(int argc, char **argv)
{
	unsigned i, once = 0, never = 0, often = 0;
	socklen_t len = sizeof(address);
	int forked, nonblock;
	pid_t parent = getpid();

	if (argc != 4)
		return 2;
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pattern = argv[1];
	receivers = atoi(argv[2]);
	datagrams = atoi(argv[3]);
	if (datagrams > DATAGRAMS_MAX || receivers > 64)
		return 2;
	sem_init(&work, 0, 0);
	sem_init(&done, 0, 0);
	state = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	forked = !strcmp(pattern, "fork") || !strcmp(pattern, "kill");
	nonblock = strcmp(pattern, "block") && strcmp(pattern, "leave") &&
		   strcmp(pattern, "messages") && strcmp(pattern, "connect") &&
		   !forked;

	server =
		socket(AF_INET, SOCK_DGRAM | (nonblock ? SOCK_NONBLOCK : 0), 0);
	address.sin_family = AF_INET;
	/* A wildcard address for some, and a single address for others. */
	address.sin_addr.s_addr = htonl(forked ? INADDR_ANY : INADDR_LOOPBACK);
	if (bind(server, (void *)&address, sizeof(address)) ||
	    getsockname(server, (void *)&address, &len))
		fail("bind");
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (!strcmp(pattern, "one-epoll")) {
		struct epoll_event event = { .events = EPOLLIN,
					     .data.u64 = 0x1122334455667788 };

		shared_epoll = epoll_create1(0);
		if (epoll_ctl(shared_epoll, EPOLL_CTL_ADD, server, &event))
			fail("epoll_ctl");
	}
	if (forked) {
		for (i = 0; i < receivers; i++) {
			children[i] = fork();
			if (children[i] == 0) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				if (getppid() == parent)
					receiver((void *)(unsigned long)i);
				_exit(0);
			}
		}
		client();
		for (i = 0; i < receivers; i++)
			wait(NULL);
	} else {
		pthread_t threads[64];

		for (i = 0; i < receivers; i++)
			pthread_create(&threads[i], NULL, receiver,
				       (void *)(unsigned long)i);
		client();
		/* Those that left by themselves take no "stop". */
		for (i = 0; i < receivers; i++)
			pthread_join(threads[i], NULL);
	}
	for (i = 0; i < datagrams; i++) {
		once += state->seen[i] == 1;
		never += state->seen[i] == 0;
		often += state->seen[i] > 1;
	}
	printf("once %u never %u often %u wrong %u\n", once, never, often,
	       state->wrong);
	close(server);
	return 0;
}
