/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A call changes a socket that three threads receive on:
 *
 *	fallback_reasons WHAT [early | queued]
 *
 * Prints how many datagrams arrived before and after it, which is all. With
 * "queued", no thread receives meanwhile; then one thread receives all that was
 * sent before and after it, in order.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define FLOWS 16
#define WORKERS 3

extern char **environ;

static int server, clients[FLOWS];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], total, answered, stamped;
/* Workers that have received wait, or one of them continues. */
static _Atomic int hold, drain;
static _Atomic unsigned held, reordered;
static unsigned short sent[FLOWS], last[FLOWS];

struct payload {
	char kind;
	unsigned char flow;
	unsigned short number;
};

/* One thread receives the datagrams of a flow in order. */
static void check(const struct payload *payload)
{
	if (payload->number <= last[payload->flow])
		reordered++;
	last[payload->flow] = payload->number;
}

static void wait_for_others(unsigned nth)
{
	held++;
	while (hold && !(drain && nth == 0))
		usleep(500);
	held--;
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		struct payload payload;
		char control[256];
		struct sockaddr_in from;
		struct iovec part = { &payload, sizeof(payload) };
		struct msghdr message = { .msg_name = &from,
					  .msg_namelen = sizeof(from),
					  .msg_control = control,
					  .msg_controllen = sizeof(control),
					  .msg_iov = &part,
					  .msg_iovlen = 1 };
		ssize_t len = recvmsg(server, &message, 0);
		struct cmsghdr *first = CMSG_FIRSTHDR(&message);

		if (len < 0) {
			perror("worker");
			exit(1);
		}
		/* Empty: the socket was shut down. */
		if (!len || payload.kind == 'S')
			return NULL;
		stamped += first && first->cmsg_type == SCM_TIMESTAMP;
		message.msg_control = NULL;
		message.msg_controllen = 0;
		if (sendmsg(server, &message, 0) > 0)
			answered++;
		if (drain && nth == 0 && payload.kind == 'x')
			check(&payload);
		received[nth]++;
		total++;
		if (hold && !(drain && nth == 0))
			wait_for_others(nth);
	}
}

static void send_one(char kind, int flow)
{
	struct payload payload = { kind, flow, kind == 'x' ? ++sent[flow] : 0 };

	if (sendto(clients[flow], &payload, sizeof(payload), 0,
		   (void *)&address, sizeof(address)) != sizeof(payload))
		perror("sendto");
}

static void send_all(int flows)
{
	int i;

	for (i = 0; i < flows; i++)
		send_one('x', i);
}

static void burst(void)
{
	unsigned want = total + FLOWS;

	send_all(FLOWS);
	while (total < want)
		usleep(50);
}

/*
 * Gives each worker one datagram; each waits until all have one. On a busy
 * machine, one thread that is awake may get all datagrams of a burst.
 */
static void deliver_to_each(void)
{
	unsigned want = total, i = 0;

	hold = 1;
	/* In flight are never more than a queue has room for. */
	while (held < WORKERS) {
		if (want - total < 2 * FLOWS) {
			send_one('h', i++ % FLOWS);
			want++;
		}
		usleep(200);
	}
	hold = 0;
	while (held || total < want)
		usleep(50);
}

static void handler(int signal)
{
	(void)signal;
}

static void broadcast(void)
{
	struct sockaddr_in all = address;
	int one = 1, i;
	unsigned want = total + 5;

	all.sin_addr.s_addr = htonl(0x7fffffff);
	setsockopt(clients[0], SOL_SOCKET, SO_BROADCAST, &one, sizeof(one));
	for (i = 0; i < 5; i++)
		if (sendto(clients[0], "x", 1, 0, (void *)&all, sizeof(all)) !=
		    1)
			perror("broadcast");
	while (total < want)
		usleep(50);
	/* By then, an additional copy would be seen. */
	burst();
	printf("broadcasts %u\n", total - want - FLOWS + 5);
}

static void pass_descriptor(void)
{
	int pair[2], got;
	char byte = 0;
	union {
		char room[CMSG_SPACE(sizeof(int))];
		struct cmsghdr header;
	} control = { .header = { .cmsg_len = CMSG_LEN(sizeof(int)),
				  .cmsg_level = SOL_SOCKET,
				  .cmsg_type = SCM_RIGHTS } };
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part,
				  .msg_iovlen = 1,
				  .msg_control = &control,
				  .msg_controllen = sizeof(control.room) };

	memcpy(CMSG_DATA(&control.header), &server, sizeof(int));
	socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
	printf("passed on: %zd\n", sendmsg(pair[0], &message, 0));
	printf("received: %zd\n", recvmsg(pair[1], &message, 0));
	memcpy(&got, CMSG_DATA(&control.header), sizeof(int));
	close(got);
	close(pair[0]);
	close(pair[1]);
}

/*
 * Starts itself, because not every program can have a preloaded library with a
 * sanitizer.
 */
static void start_program(void)
{
	char *args[] = { "fallback_reasons", "nothing", NULL };
	pid_t pid;
	int status = -1;

	if (posix_spawnp(&pid, "/proc/self/exe", NULL, NULL, args, environ) ==
	    0)
		waitpid(pid, &status, 0);
	printf("started: %d\n", status);
}

/* Another thread that waits on the epoll instance. */
static void *wait_for_events(void *epoll)
{
	struct epoll_event event;

	epoll_wait((int)(long)epoll, &event, 1, 0);
	return NULL;
}

static void change_epoll(const char *what)
{
	struct epoll_event event = { .events = EPOLLIN };
	int i, epoll = epoll_create1(0), outer = epoll_create1(0);
	pthread_t other;

	if (!strcmp(what, "events"))
		event.events |= EPOLLONESHOT;
	/* As many as the library tracks in an instance. */
	for (i = 0; !strcmp(what, "full") && i < 32; i++)
		epoll_ctl(epoll, EPOLL_CTL_ADD, socket(AF_INET, SOCK_DGRAM, 0),
			  &event);
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	if (!strcmp(what, "nested-epoll"))
		printf("nested: %d\n",
		       epoll_ctl(outer, EPOLL_CTL_ADD, epoll, &event));
	if (!strcmp(what, "shared-epoll")) {
		wait_for_events((void *)(long)epoll);
		pthread_create(&other, NULL, wait_for_events,
			       (void *)(long)epoll);
		pthread_join(other, NULL);
	}
	if (!strcmp(what, "twice"))
		epoll_ctl(epoll, EPOLL_CTL_ADD, dup(server), &event);
}

/* Counts sockets of this process with our port that are not bound to "lo". */
static int count_without_device(void)
{
	int fd, without = 0;

	for (fd = 3; fd < 4096; fd++) {
		struct sockaddr_in at = { 0 };
		socklen_t len = sizeof(at);
		char name[16] = "";

		/* Bypasses any library. */
		if (syscall(SYS_getsockname, fd, &at, &len) ||
		    at.sin_port != address.sin_port)
			continue;
		len = sizeof(name);
		syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_BINDTODEVICE, name,
			&len);
		without += strcmp(name, "lo") != 0;
	}
	return without;
}

static int enable_option(int level, int option)
{
	int one = 1;

	return setsockopt(server, level, option, &one, sizeof(one));
}

static void apply_change(const char *what)
{
	struct sigaction action = { .sa_handler = handler };
	struct ip_mreq group = { .imr_multiaddr.s_addr = htonl(0xef010203),
				 .imr_interface.s_addr =
					 htonl(INADDR_LOOPBACK) };
	struct sockaddr_in peer;
	socklen_t len;

	if (!strcmp(what, "broadcast")) {
		broadcast();
	} else if (!strcmp(what, "passed")) {
		pass_descriptor();
	} else if (!strcmp(what, "exec")) {
		start_program();
	} else if (!strcmp(what, "signals")) {
		sigaction(SIGUSR1, &action, NULL);
		/*
		 * As signal(), whose handlers interrupt calls under
		 * ThreadSanitizer.
		 */
		ssignal(SIGUSR2, handler);
	} else if (!strcmp(what, "multicast")) {
		printf("joined: %d\n",
		       setsockopt(server, SOL_IP, IP_ADD_MEMBERSHIP, &group,
				  sizeof(group)));
	} else if (!strcmp(what, "option")) {
		printf("option: %d\n", enable_option(SOL_SOCKET, SO_RXQ_OVFL));
	} else if (!strcmp(what, "error-queue")) {
		printf("option: %d\n", enable_option(SOL_IP, IP_RECVERR));
	} else if (!strcmp(what, "reuseport")) {
		printf("option: %d\n", enable_option(SOL_SOCKET, SO_REUSEPORT));
	} else if (!strcmp(what, "timestamp")) {
		printf("option: %d\n", enable_option(SOL_SOCKET, SO_TIMESTAMP));
	} else if (!strcmp(what, "device")) {
		setsockopt(server, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
		printf("without device: %d\n", count_without_device());
	} else if (!strcmp(what, "ioctl")) {
		struct timeval time;

		ioctl(server, SIOCGSTAMP, &time);
	} else if (!strcmp(what, "connect")) {
		len = sizeof(peer);
		getsockname(clients[0], (void *)&peer, &len);
		peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		printf("connect: %d\n",
		       connect(server, (void *)&peer, sizeof(peer)));
	} else if (!strcmp(what, "shutdown")) {
		printf("shutdown: %d\n", shutdown(server, SHUT_RDWR));
	} else if (strstr(what, "epoll") || !strcmp(what, "events") ||
		   !strcmp(what, "full") || !strcmp(what, "twice")) {
		change_epoll(what);
	} else if (!strcmp(what, "user")) {
		printf("user: %d\n", setuid(65534));
		/* PR_SET_PDEATHSIG is cleared when the user changes. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	} else if (!strcmp(what, "fork")) {
		pid_t pid = fork();

		if (pid == 0)
			_exit(0);
		waitpid(pid, NULL, 0);
	}
}

/* Sends few enough for one queue. */
static void run_queued(const char *what)
{
	unsigned want, before = total;
	int i, flows = FLOWS;

	hold = 1;
	/*
	 * Lanes may still be added while workers receive these, so they have no
	 * order.
	 */
	for (i = 0; i < FLOWS; i++)
		send_one('h', i);
	while (held < WORKERS)
		usleep(50);
	for (i = 0; i < 4; i++)
		send_all(FLOWS);
	want = 5 * FLOWS;
	apply_change(what);
	/* After that only the peer's datagrams are received, or none. */
	if (!strcmp(what, "connect"))
		flows = 1;
	if (!strcmp(what, "shutdown"))
		flows = 0;
	for (i = 0; i < 4; i++)
		send_all(flows);
	want += 4 * flows;
	printf("queued %u\n", want);
	/*
	 * A waiting worker has had one, unless it saw late that it is to wait.
	 */
	want += before;
	drain = 1;
	while (total < want)
		usleep(50);
	printf("out of order %u\n", reordered);
	hold = 0;
	while (held)
		usleep(50);
}

int main(int argc, char **argv)
{
	pthread_t threads[WORKERS];
	socklen_t len = sizeof(address);
	int i, ready, early, is_queued, one_flow;

	if (argc < 2)
		return 2;
	if (!strcmp(argv[1], "nothing"))
		return 0;
	early = argc > 2 && !strcmp(argv[2], "early");
	is_queued = argc > 2 && !strcmp(argv[2], "queued");
	one_flow = !strcmp(argv[1], "connect");
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	server = socket(AF_INET, SOCK_DGRAM, 0);
	address.sin_family = AF_INET;
	if (bind(server, (void *)&address, sizeof(address)) ||
	    getsockname(server, (void *)&address, &len))
		return 1;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	/* Before the first receive, for changes that apply from the start. */
	if (early)
		apply_change(argv[1]);
	for (i = 0; i < WORKERS; i++)
		pthread_create(&threads[i], NULL, worker,
			       (void *)(unsigned long)i);
	/* Until each has received often enough for a queue of its own. */
	for (i = 0; i < 100; i++)
		burst();
	do {
		deliver_to_each();
		for (i = 0, ready = 0; i < WORKERS; i++)
			ready += received[i] >= 50;
	} while (ready < WORKERS);
	if (is_queued) {
		run_queued(argv[1]);
	} else {
		if (!early)
			apply_change(argv[1]);
		stamped = 0;
		for (i = 0; i < 100; i++)
			burst();
		if (!strcmp(argv[1], "timestamp"))
			printf("stamped %u\n", stamped);
	}
	printf("unanswered %u\n", total - answered);
	for (i = 0; i < WORKERS; i++)
		if (!strcmp(argv[1], "cancel"))
			pthread_cancel(threads[i]);
	for (i = 0; i < WORKERS; i++)
		send_one('S', one_flow ? 0 : i);
	for (i = 0; i < WORKERS; i++)
		pthread_join(threads[i], NULL);
	close(server);
	return 0;
}
