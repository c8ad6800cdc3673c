/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What becomes of replies that are kept to be sent together:
 *
 *	replies CASE
 *
 * A server of two threads (or processes: "die") answers clients in the process
 * that started it. When both have come back often, they park, where the library
 * does not see it, and much is sent. Then one of them answers some of it, and
 * in the midst of what one call took does what CASE says, and no more: all that
 * it has answered is to arrive, from then on without its doing. Last, the other
 * one answers the rest. Prints what came, and what came twice, in another order
 * or with other bytes: the same with the library as without.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FLOWS 16
#define WORKERS 2
#define EACH 12
#define SOME 10
#define LONGEST 24
/* Milliseconds: lanes come after a grace period, seconds on a busy machine. */
#define PATIENCE 30000
/* An address that can be taken away. */
#define CLIENTS 0x0a090909

struct word {
	unsigned char flow, pad;
	unsigned short number;
	unsigned char rest[LONGEST - 4];
};

static struct state {
	_Atomic unsigned received[WORKERS];
	_Atomic int parked, park[WORKERS], quota[WORKERS], acts, owed, told;
	_Atomic int port, children[WORKERS];
} * all;

static const char *way;
static int server, other, idle[2], clients[FLOWS];
static unsigned short sent[FLOWS], next[FLOWS];
static unsigned wrong, answered;
static struct sockaddr_in address;

static int is(const char *what)
{
	return !strcmp(way, what);
}

/* A sleep that the library does not know of. */
static void nap(void)
{
	struct timespec time = { 0, 200000 };

	syscall(SYS_nanosleep, &time, NULL);
}

static void fail(const char *what)
{
	perror(what);
	syscall(SYS_exit_group, 1);
}

static size_t fill(struct word *word, int flow, unsigned short number)
{
	size_t len = 8 + number % (LONGEST - 8);

	memset(word, flow + number, sizeof(*word));
	word->flow = flow;
	word->number = number;
	return len;
}

static void request(unsigned long what, struct ifreq *request)
{
	int fd = syscall(SYS_socket, AF_INET, SOCK_DGRAM, 0);

	if (syscall(SYS_ioctl, fd, what, request))
		fail("ioctl");
	syscall(SYS_close, fd);
}

/* The clients' address goes, or comes back, and the way to it. */
static void device(int up)
{
	struct sockaddr_in own = { .sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(CLIENTS) };
	struct ifreq lo = { .ifr_name = "lo",
			    .ifr_flags = IFF_UP | IFF_RUNNING };
	struct ifreq alias = { .ifr_name = "lo:1" };

	if (!up) {
		request(SIOCSIFFLAGS, &alias);
		return;
	}
	request(SIOCSIFFLAGS, &lo);
	memcpy(&alias.ifr_addr, &own, sizeof(own));
	request(SIOCSIFADDR, &alias);
	own.sin_addr.s_addr = INADDR_NONE;
	memcpy(&alias.ifr_addr, &own, sizeof(own));
	request(SIOCSIFNETMASK, &alias);
}

static void one(unsigned nth, int flags)
{
	char bytes[LONGEST];
	struct sockaddr_in from;
	socklen_t len = sizeof(from);
	ssize_t got =
		recvfrom(server, bytes, sizeof(bytes), 0, (void *)&from, &len);
	struct iovec parts[2] = { { bytes, 3 }, { bytes + 3, got - 3 } };
	struct msghdr message = { .msg_name = &from,
				  .msg_namelen = len,
				  .msg_iov = parts,
				  .msg_iovlen = 2 };

	if (got < 8)
		fail("recvfrom");
	/* By one call or the other. */
	if (bytes[2] & 1)
		len = sendmsg(server, &message, flags);
	else
		len = sendto(server, bytes, got, flags, (void *)&from, len);
	if ((ssize_t)len != got)
		fail("sendto");
	memset(bytes, 0, sizeof(bytes));
	all->received[nth]++;
}

static void act(void)
{
	struct pollfd at = { .fd = idle[0], .events = POLLIN };
	struct epoll_event event = { .events = EPOLLIN };
	char *args[] = { "true", NULL };
	fd_set set;
	char byte, bytes[LONGEST];
	struct iovec part = { bytes, sizeof(bytes) };
	struct mmsghdr message = {
		.msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 },
	};
	struct timespec forever = { 1000, 0 };
	struct sockaddr_in nobody = address;
	int fd, local[2], client = socket(AF_INET, SOCK_DGRAM, 0);
	pid_t pid;

	nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	nobody.sin_port = htons(9);
	syscall(SYS_socketpair, AF_UNIX, SOCK_DGRAM, 0, local);
	if (is("poll"))
		poll(&at, 1, -1);
	if (is("select")) {
		FD_ZERO(&set);
		FD_SET(idle[0], &set);
		select(idle[0] + 1, &set, NULL, NULL, NULL);
	}
	if (is("epoll")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, idle[0], &event);
		epoll_wait(fd, &event, 1, -1);
	}
	if (is("read") && read(idle[0], &byte, 1))
		fail("read");
	if (is("write") && write(idle[1], "", 1) != 1)
		fail("write");
	if (is("ppoll"))
		ppoll(&at, 1, NULL, NULL);
	if (is("pselect")) {
		FD_ZERO(&set);
		FD_SET(idle[0], &set);
		pselect(idle[0] + 1, &set, NULL, NULL, NULL, NULL);
	}
	if (is("pwait") || is("pwait2")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, idle[0], &event);
		if (is("pwait"))
			epoll_pwait(fd, &event, 1, -1, NULL);
		else
			epoll_pwait2(fd, &event, 1, NULL, NULL);
	}
	/* What is no UDP socket is received from by all calls, too. */
	if (is("readv") && readv(idle[0], &part, 1))
		fail("readv");
	if (is("recv"))
		recv(local[0], bytes, sizeof(bytes), 0);
	if (is("recvmmsg"))
		recvmmsg(local[0], &message, 1, 0, NULL);
	if (is("errors"))
		recv(server, bytes, sizeof(bytes), MSG_ERRQUEUE);
	if (is("usleep"))
		usleep(1000000000);
	if (is("nanosleep"))
		nanosleep(&forever, NULL);
	if (is("clock"))
		clock_nanosleep(CLOCK_MONOTONIC, 0, &forever, NULL);
	/* Calls that the kernel refuses. */
	if (is("connect"))
		connect(-1, NULL, 0);
	if (is("shutdown"))
		shutdown(-1, SHUT_RD);
	if (is("range"))
		close_range(1 << 20, 1 << 20, 0);
	if (is("dup2"))
		dup2(-1, 900);
	if (is("dup3"))
		dup3(-1, 900, 0);
	if (is("setsockopt"))
		setsockopt(-1, 0, 0, NULL, 0);
	if (is("send"))
		send(local[0], "x", 1, 0);
	if (is("client") &&
	    sendto(client, "x", 1, 0, (void *)&nobody, sizeof(nobody)) != 1)
		fail("sendto");
	if (is("sendmmsg"))
		sendmmsg(local[0], &message, 1, 0);
	if (is("spawn")) {
		posix_spawn(&pid, "/bin/true", NULL, NULL, args, environ);
		waitpid(pid, NULL, 0);
	}
	if (is("sleep"))
		sleep(1000);
	if (is("close"))
		close(-1);
	if (is("other"))
		one(0, MSG_CONFIRM);
	/* Another socket, on which nothing comes. */
	if (is("spin"))
		while (recv(other, bytes, sizeof(bytes), MSG_DONTWAIT) < 0)
			nap();
	at.fd = other;
	if (is("other-poll"))
		poll(&at, 1, -1);
	if (is("other-epoll") || is("learn-epoll")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, other, &event);
		epoll_wait(fd, &event, 1, -1);
	}
	/* The thread's own lane, of which it wants to know nothing any more. */
	if (is("own-epoll")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, server, &event);
		epoll_wait(fd, &event, 1, -1);
		event.events = 0;
		epoll_ctl(fd, EPOLL_CTL_MOD, server, &event);
		epoll_wait(fd, &event, 1, -1);
	}
	/* More pieces than the kernel takes. */
	if (is("refused")) {
		struct msghdr many = { .msg_iov = &part, .msg_iovlen = 1025 };

		if (recvmsg(server, &many, 0) >= 0)
			fail("recvmsg");
	}
	if (is("fork")) {
		/* The library can open no file before that, nor close it. */
		struct rlimit none = { 0, 4096 };

		if (setrlimit(RLIMIT_NOFILE, &none))
			fail("setrlimit");
		pid = fork();
		if (!pid)
			syscall(SYS_exit_group, 0);
		waitpid(pid, NULL, 0);
	}
	if (is("thread"))
		pthread_exit(NULL);
	if (is("cancel")) {
		pthread_cancel(pthread_self());
		pthread_testcancel();
	}
	if (is("exit"))
		exit(0);
	if (is("_exit"))
		_exit(0);
	if (is("quick"))
		quick_exit(0);
	if (is("exec"))
		execv("/bin/true", args);
	if (is("error")) {
		device(0);
		close(-1);
		device(1);
		all->park[0] = 1;
	}
	all->acts = 1;
	/* Neither a call nor a return any more. */
	while (!is("error"))
		nap();
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		if (all->park[nth]) {
			close(-1);
			all->parked++;
			while (all->park[nth])
				nap();
			all->parked--;
		}
		if (all->owed) {
			struct sockaddr_in nobody = address;

			nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
			nobody.sin_port = htons(9);
			all->owed = 0;
			all->told = sendto(server, "x", 1, 0, (void *)&nobody,
					   sizeof(nobody)) < 0 ?
					    errno :
					    -1;
			continue;
		}
		one(nth, 0);
		if (all->quota[nth] && !--all->quota[nth])
			act();
	}
	return NULL;
}

static void serve(void)
{
	pthread_t threads[WORKERS];
	socklen_t len = sizeof(address);
	struct sockaddr_in nobody = { .sin_family = AF_INET };
	int on = 1, off = 0, i;
	pid_t pid;

	/* Nobody outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	server = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	address.sin_family = AF_INET;
	address.sin_addr.s_addr =
		htonl(is("error") ? INADDR_ANY : INADDR_LOOPBACK);
	if (pipe(idle) || bind(server, (void *)&address, sizeof(address)) ||
	    getsockname(server, (void *)&address, &len))
		fail("bind");
	other = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	nobody.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(other, (void *)&nobody, sizeof(nobody)))
		fail("bind");
	/* It has a receiver, and the worker will be the second one. */
	if (is("learn-epoll"))
		recv(other, &on, sizeof(on), MSG_DONTWAIT);
	for (i = 0; i < WORKERS; i++) {
		if (!is("die")) {
			pthread_create(&threads[i], NULL, worker,
				       (void *)(unsigned long)i);
			continue;
		}
		pid = fork();
		if (!pid) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			worker((void *)(unsigned long)i);
		}
		all->children[i] = pid;
	}
	all->port = ntohs(address.sin_port);
	while (!all->acts)
		nap();
	/* What another thread does to the socket. */
	if (is("option"))
		setsockopt(server, SOL_IP, IP_TTL, &on, sizeof(on));
	if (is("fall"))
		setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof(on));
	if (is("ioctl"))
		ioctl(server, FIOASYNC, &off);
	if (is("closed")) {
		/* The descriptor remains, for nobody to close it twice. */
		close(server);
	}
	for (;;)
		nap();
}

static void send_one(int flow)
{
	struct word word;
	size_t len = fill(&word, flow, sent[flow]);

	if (send(clients[flow], &word, len, 0) != (ssize_t)len)
		fail("send");
	sent[flow]++;
}

/* Takes answers until there are `want`, or none comes any more. */
static void take(unsigned want)
{
	struct pollfd at[FLOWS];
	struct word word, expected;
	size_t len;
	int i;

	for (i = 0; i < FLOWS; i++)
		at[i] = (struct pollfd){ .fd = clients[i], .events = POLLIN };
	while (answered < want && poll(at, FLOWS, PATIENCE) > 0) {
		for (i = 0; i < FLOWS; i++) {
			if (!at[i].revents)
				continue;
			len = fill(&expected, i, next[i]);
			memset(&word, 255, sizeof(word));
			if (recv(clients[i], &word, sizeof(word), 0) !=
				    (ssize_t)len ||
			    memcmp(&word, &expected, len))
				wrong++;
			next[i] = word.number + 1;
			answered++;
		}
	}
}

static unsigned asked(void)
{
	unsigned sum = 0;

	for (int i = 0; i < FLOWS; i++)
		sum += sent[i];
	return sum;
}

int main(int argc, char **argv)
{
	unsigned before, ready;
	int i, turn, ends;
	pid_t pid;

	if (argc < 2)
		return 2;
	way = argv[1];
	if (is("error")) {
		if (unshare(CLONE_NEWNET)) {
			printf("skipped: %s\n", strerror(errno));
			return 0;
		}
		device(1);
	}
	all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid = fork();
	if (!pid)
		serve();
	while (!all->port)
		nap();
	address.sin_family = AF_INET;
	address.sin_addr.s_addr =
		htonl(is("error") ? CLIENTS : INADDR_LOOPBACK);
	address.sin_port = htons(all->port);
	for (i = 0; i < FLOWS; i++) {
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
		if (connect(clients[i], (void *)&address, sizeof(address)))
			fail("connect");
	}
	do {
		for (i = 0; i < FLOWS; i++)
			send_one(i);
		take(asked());
		for (i = 0, ready = 0; i < WORKERS; i++)
			ready += all->received[i] >= 200;
	} while (ready < WORKERS && answered == asked());
	for (i = 0; i < WORKERS; i++)
		all->park[i] = 1;
	/* One wakes them up; no more than their queues have room for. */
	for (i = 0; all->parked < WORKERS; i++) {
		if (asked() - all->received[0] - all->received[1] < 4 * FLOWS)
			send_one(i % FLOWS);
		usleep(2000);
	}
	/* What they have received they have answered; something may be left. */
	take(all->received[0] + all->received[1]);
	for (turn = 0; turn < SOME; turn++)
		for (i = 0; i < FLOWS; i++)
			send_one(i);
	before = answered;
	all->quota[0] = EACH;
	all->park[0] = 0;
	if (is("look"))
		all->park[1] = 0;
	if (is("die")) {
		while (!all->acts)
			nap();
		kill(all->children[0], SIGKILL);
		all->park[1] = 0;
	}
	if (is("error")) {
		while (!all->acts)
			nap();
		while (all->parked < WORKERS)
			nap();
	}
	ends = is("exit") || is("_exit") || is("quick") || is("exec") ||
	       is("closed");
	if (is("error")) {
		all->owed = 1;
		all->park[1] = 0;
		while (!all->told)
			nap();
		printf("then %s\n",
		       all->told < 0 ? "sent" : strerror(all->told));
		all->told = 0;
		all->owed = 1;
		for (i = 0; !all->told; i++) {
			send_one(i % FLOWS);
			nap();
		}
		printf("then %s\n",
		       all->told < 0 ? "sent" : strerror(all->told));
	} else if (is("look") || is("die")) {
		take(asked());
	} else {
		take(before + EACH + is("other"));
		printf("answered %u\n", answered - before);
		all->park[1] = 0;
		if (!ends)
			take(asked());
	}
	if (!ends && !is("error"))
		printf("missing %u\n", asked() - answered);
	if (!is("error"))
		printf("wrong %u\n", wrong);
	fflush(stdout);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	syscall(SYS_exit_group, 0);
}
