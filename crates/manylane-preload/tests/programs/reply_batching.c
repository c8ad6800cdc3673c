/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Batched replies:
 *
 *	reply_batching CASE
 *
 * A server of two threads (or processes: "kill") answers clients in the process
 * that started it. When the library has seen both return often, they park where
 * the library does not see it, and many datagrams are sent. Then one of them
 * answers some of these, and in the middle of a prefetch does what CASE says,
 * and nothing more. All its replies have to arrive, although it does nothing
 * from then on. Last, the other one answers the rest. Prints how many replies
 * arrived, and how many were duplicated, reordered or wrong: the same with the
 * library as without.
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
#define RECEIVES_PER_WORKER 12
#define BURSTS 10
#define LENGTH_MAX 24
/*
 * Milliseconds: lanes are added after a grace period, seconds on a busy
 * machine.
 */
#define TIMEOUT_MS 100000
/* An address that can be removed. */
#define CLIENT_ADDR 0x0a090909

struct payload {
	unsigned char flow, pad;
	unsigned short number;
	unsigned char data[LENGTH_MAX - 4];
};

static struct state {
	_Atomic unsigned received[WORKERS];
	_Atomic int parked, park[WORKERS], quota[WORKERS], has_acted, probe,
		probe_errno;
	_Atomic int port, children[WORKERS];
} * shared;

static const char *test_case;
static int server, other, idle[2], clients[FLOWS];
static unsigned short sent[FLOWS], next[FLOWS];
static unsigned wrong, answered;
static struct sockaddr_in address;

static int is_case(const char *what)
{
	return !strcmp(test_case, what);
}

/* A sleep that the library does not see. */
static void raw_sleep(void)
{
	struct timespec time = { 0, 200000 };

	syscall(SYS_nanosleep, &time, NULL);
}

static void fail(const char *what)
{
	perror(what);
	syscall(SYS_exit_group, 1);
}

static size_t fill_payload(struct payload *payload, int flow,
			   unsigned short number)
{
	size_t len = 8 + number % (LENGTH_MAX - 8);

	memset(payload, flow + number, sizeof(*payload));
	payload->flow = flow;
	payload->number = number;
	return len;
}

static void request(unsigned long what, struct ifreq *request)
{
	int fd = syscall(SYS_socket, AF_INET, SOCK_DGRAM, 0);

	if (syscall(SYS_ioctl, fd, what, request))
		fail("ioctl");
	syscall(SYS_close, fd);
}

/* Removes or restores the clients' address, and the route to it. */
static void configure_address(int up)
{
	struct sockaddr_in own = { .sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(CLIENT_ADDR) };
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

static void answer_one(unsigned nth, int flags)
{
	char bytes[LENGTH_MAX];
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
	/* By one of two calls. */
	if (bytes[2] & 1)
		len = sendmsg(server, &message, flags);
	else
		len = sendto(server, bytes, got, flags, (void *)&from, len);
	if ((ssize_t)len != got)
		fail("sendto");
	memset(bytes, 0, sizeof(bytes));
	shared->received[nth]++;
}

/*
 * The child has a table of descriptors of its own, in which it closes what the
 * replies would be sent by.
 */
static __attribute__((noinline)) void close_all_in_vfork(void)
{
	pid_t pid = vfork();

	if (!pid) {
		close_range(3, ~0U, 0);
		close(-1);
		_exit(0);
	}
	waitpid(pid, NULL, 0);
}

static void run_case(void)
{
	struct pollfd at = { .fd = idle[0], .events = POLLIN };
	struct epoll_event event = { .events = EPOLLIN };
	char *args[] = { "true", NULL };
	fd_set set;
	char byte, bytes[LENGTH_MAX];
	struct iovec part = { bytes, sizeof(bytes) };
	struct mmsghdr message = {
		.msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 },
	};
	struct timespec forever = { 1000, 0 };
	struct sockaddr_in unbound = address;
	int fd, local[2], client = socket(AF_INET, SOCK_DGRAM, 0);
	pid_t pid;

	unbound.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	unbound.sin_port = htons(9);
	syscall(SYS_socketpair, AF_UNIX, SOCK_DGRAM, 0, local);
	if (is_case("poll"))
		poll(&at, 1, -1);
	if (is_case("select")) {
		FD_ZERO(&set);
		FD_SET(idle[0], &set);
		select(idle[0] + 1, &set, NULL, NULL, NULL);
	}
	if (is_case("epoll")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, idle[0], &event);
		epoll_wait(fd, &event, 1, -1);
	}
	if (is_case("read") && read(idle[0], &byte, 1))
		fail("read");
	if (is_case("write") && write(idle[1], "", 1) != 1)
		fail("write");
	if (is_case("ppoll"))
		ppoll(&at, 1, NULL, NULL);
	if (is_case("pselect")) {
		FD_ZERO(&set);
		FD_SET(idle[0], &set);
		pselect(idle[0] + 1, &set, NULL, NULL, NULL, NULL);
	}
	if (is_case("pwait") || is_case("pwait2")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, idle[0], &event);
		if (is_case("pwait"))
			epoll_pwait(fd, &event, 1, -1, NULL);
		else
			epoll_pwait2(fd, &event, 1, NULL, NULL);
	}
	/* All calls are also made on a descriptor that is no UDP socket. */
	if (is_case("readv") && readv(idle[0], &part, 1))
		fail("readv");
	if (is_case("recv"))
		recv(local[0], bytes, sizeof(bytes), 0);
	if (is_case("recvmmsg"))
		recvmmsg(local[0], &message, 1, 0, NULL);
	if (is_case("errors"))
		recv(server, bytes, sizeof(bytes), MSG_ERRQUEUE);
	if (is_case("usleep"))
		usleep(1000000000);
	if (is_case("nanosleep"))
		nanosleep(&forever, NULL);
	if (is_case("clock"))
		clock_nanosleep(CLOCK_MONOTONIC, 0, &forever, NULL);
	/* Calls that the kernel refuses. */
	if (is_case("connect"))
		connect(-1, NULL, 0);
	if (is_case("shutdown"))
		shutdown(-1, SHUT_RD);
	if (is_case("range"))
		close_range(1 << 20, 1 << 20, 0);
	if (is_case("dup2"))
		dup2(-1, 900);
	if (is_case("dup3"))
		dup3(-1, 900, 0);
	if (is_case("setsockopt"))
		setsockopt(-1, 0, 0, NULL, 0);
	if (is_case("send"))
		send(local[0], "x", 1, 0);
	if (is_case("client") &&
	    sendto(client, "x", 1, 0, (void *)&unbound, sizeof(unbound)) != 1)
		fail("sendto");
	if (is_case("sendmmsg"))
		sendmmsg(local[0], &message, 1, 0);
	if (is_case("spawn")) {
		posix_spawn(&pid, "/bin/true", NULL, NULL, args, environ);
		waitpid(pid, NULL, 0);
	}
	if (is_case("vfork")) {
		close_all_in_vfork();
		close(-1);
	}
	if (is_case("sleep"))
		sleep(1000);
	if (is_case("close"))
		close(-1);
	if (is_case("other"))
		answer_one(0, MSG_CONFIRM);
	/* Another socket, on which no datagram arrives. */
	if (is_case("spin"))
		while (recv(other, bytes, sizeof(bytes), MSG_DONTWAIT) < 0)
			raw_sleep();
	at.fd = other;
	if (is_case("other-poll"))
		poll(&at, 1, -1);
	if (is_case("other-epoll") || is_case("learn-epoll")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, other, &event);
		epoll_wait(fd, &event, 1, -1);
	}
	/* The thread's own lane, which it stops watching. */
	if (is_case("own-epoll")) {
		fd = epoll_create1(0);
		epoll_ctl(fd, EPOLL_CTL_ADD, server, &event);
		epoll_wait(fd, &event, 1, -1);
		event.events = 0;
		epoll_ctl(fd, EPOLL_CTL_MOD, server, &event);
		epoll_wait(fd, &event, 1, -1);
	}
	/* More iovecs than the kernel accepts. */
	if (is_case("refused")) {
		struct msghdr many = { .msg_iov = &part, .msg_iovlen = 1025 };

		if (recvmsg(server, &many, 0) >= 0)
			fail("recvmsg");
	}
	if (is_case("fork")) {
		/* The library can open no file before that, nor close one. */
		struct rlimit none = { 0, 4096 };

		if (setrlimit(RLIMIT_NOFILE, &none))
			fail("setrlimit");
		pid = fork();
		if (!pid)
			syscall(SYS_exit_group, 0);
		waitpid(pid, NULL, 0);
	}
	if (is_case("thread"))
		pthread_exit(NULL);
	if (is_case("cancel")) {
		pthread_cancel(pthread_self());
		pthread_testcancel();
	}
	if (is_case("exit"))
		exit(0);
	if (is_case("_exit"))
		_exit(0);
	if (is_case("quick"))
		quick_exit(0);
	if (is_case("exec"))
		execv("/bin/true", args);
	if (is_case("error")) {
		configure_address(0);
		close(-1);
		configure_address(1);
		shared->park[0] = 1;
	}
	shared->has_acted = 1;
	/* No call and no return from now on. */
	while (!is_case("error"))
		raw_sleep();
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;

	for (;;) {
		if (shared->park[nth]) {
			close(-1);
			shared->parked++;
			while (shared->park[nth])
				raw_sleep();
			shared->parked--;
		}
		if (shared->probe) {
			struct sockaddr_in unbound = address;

			unbound.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
			unbound.sin_port = htons(9);
			shared->probe = 0;
			shared->probe_errno =
				sendto(server, "x", 1, 0, (void *)&unbound,
				       sizeof(unbound)) < 0 ?
					errno :
					-1;
			continue;
		}
		answer_one(nth, 0);
		if (shared->quota[nth] && !--shared->quota[nth])
			run_case();
	}
	return NULL;
}

static void serve(void)
{
	pthread_t threads[WORKERS];
	socklen_t len = sizeof(address);
	struct sockaddr_in unbound = { .sin_family = AF_INET };
	int on = 1, off = 0, i;
	pid_t pid;

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	server = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	address.sin_family = AF_INET;
	address.sin_addr.s_addr =
		htonl(is_case("error") ? INADDR_ANY : INADDR_LOOPBACK);
	if (pipe(idle) || bind(server, (void *)&address, sizeof(address)) ||
	    getsockname(server, (void *)&address, &len))
		fail("bind");
	other = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	unbound.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(other, (void *)&unbound, sizeof(unbound)))
		fail("bind");
	/* It has a receiver, and the worker will be the second one. */
	if (is_case("learn-epoll"))
		recv(other, &on, sizeof(on), MSG_DONTWAIT);
	for (i = 0; i < WORKERS; i++) {
		if (!is_case("kill")) {
			pthread_create(&threads[i], NULL, worker,
				       (void *)(unsigned long)i);
			continue;
		}
		pid = fork();
		if (!pid) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			worker((void *)(unsigned long)i);
		}
		shared->children[i] = pid;
	}
	shared->port = ntohs(address.sin_port);
	while (!shared->has_acted)
		raw_sleep();
	/* A change of the socket by another thread. */
	if (is_case("option"))
		setsockopt(server, SOL_IP, IP_TTL, &on, sizeof(on));
	if (is_case("fallback"))
		setsockopt(server, SOL_SOCKET, SO_RXQ_OVFL, &on, sizeof(on));
	if (is_case("ioctl"))
		ioctl(server, FIOASYNC, &off);
	if (is_case("closed")) {
		/*
		 * The descriptor remains open, so that it is not closed twice.
		 */
		close(server);
	}
	for (;;)
		raw_sleep();
}

static void send_one(int flow)
{
	struct payload payload;
	size_t len = fill_payload(&payload, flow, sent[flow]);

	if (send(clients[flow], &payload, len, 0) != (ssize_t)len)
		fail("send");
	sent[flow]++;
}

/* Receives replies until there are `want`, or none arrives any more. */
static void receive_replies(unsigned want)
{
	struct pollfd at[FLOWS];
	struct payload payload, expected;
	size_t len;
	int i;

	for (i = 0; i < FLOWS; i++)
		at[i] = (struct pollfd){ .fd = clients[i], .events = POLLIN };
	while (answered < want && poll(at, FLOWS, TIMEOUT_MS) > 0) {
		for (i = 0; i < FLOWS; i++) {
			if (!at[i].revents)
				continue;
			len = fill_payload(&expected, i, next[i]);
			memset(&payload, 255, sizeof(payload));
			if (recv(clients[i], &payload, sizeof(payload), 0) !=
				    (ssize_t)len ||
			    memcmp(&payload, &expected, len))
				wrong++;
			next[i] = payload.number + 1;
			answered++;
		}
	}
}

static unsigned total_sent(void)
{
	unsigned sum = 0;

	for (int i = 0; i < FLOWS; i++)
		sum += sent[i];
	return sum;
}

int main(int argc, char **argv)
{
	unsigned before, ready;
	int i, round, ends;
	pid_t pid;

	if (argc < 2)
		return 2;
	test_case = argv[1];
	if (is_case("error")) {
		if (unshare(CLONE_NEWNET)) {
			printf("skipped: %s\n", strerror(errno));
			return 0;
		}
		configure_address(1);
	}
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid = fork();
	if (!pid)
		serve();
	while (!shared->port)
		raw_sleep();
	address.sin_family = AF_INET;
	address.sin_addr.s_addr =
		htonl(is_case("error") ? CLIENT_ADDR : INADDR_LOOPBACK);
	address.sin_port = htons(shared->port);
	for (i = 0; i < FLOWS; i++) {
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
		if (connect(clients[i], (void *)&address, sizeof(address)))
			fail("connect");
	}
	do {
		for (i = 0; i < FLOWS; i++)
			send_one(i);
		receive_replies(total_sent());
		for (i = 0, ready = 0; i < WORKERS; i++)
			ready += shared->received[i] >= 200;
	} while (ready < WORKERS && answered == total_sent());
	for (i = 0; i < WORKERS; i++)
		shared->park[i] = 1;
	/*
	 * Wakes them up, with no more datagrams than their queues have room
	 * for.
	 */
	for (i = 0; shared->parked < WORKERS; i++) {
		if (total_sent() - shared->received[0] - shared->received[1] <
		    4 * FLOWS)
			send_one(i % FLOWS);
		usleep(2000);
	}
	/*
	 * They have answered what they have received; some datagrams may be
	 * left.
	 */
	receive_replies(shared->received[0] + shared->received[1]);
	for (round = 0; round < BURSTS; round++)
		for (i = 0; i < FLOWS; i++)
			send_one(i);
	before = answered;
	shared->quota[0] = RECEIVES_PER_WORKER;
	shared->park[0] = 0;
	if (is_case("flush"))
		shared->park[1] = 0;
	if (is_case("kill")) {
		while (!shared->has_acted)
			raw_sleep();
		kill(shared->children[0], SIGKILL);
		shared->park[1] = 0;
	}
	if (is_case("error")) {
		while (!shared->has_acted)
			raw_sleep();
		while (shared->parked < WORKERS)
			raw_sleep();
	}
	ends = is_case("exit") || is_case("_exit") || is_case("quick") ||
	       is_case("exec") || is_case("closed");
	if (is_case("error")) {
		shared->probe = 1;
		shared->park[1] = 0;
		while (!shared->probe_errno)
			raw_sleep();
		printf("then %s\n", shared->probe_errno < 0 ?
					    "sent" :
					    strerror(shared->probe_errno));
		shared->probe_errno = 0;
		shared->probe = 1;
		for (i = 0; !shared->probe_errno; i++) {
			send_one(i % FLOWS);
			raw_sleep();
		}
		printf("then %s\n", shared->probe_errno < 0 ?
					    "sent" :
					    strerror(shared->probe_errno));
	} else if (is_case("flush") || is_case("kill")) {
		receive_replies(total_sent());
	} else {
		receive_replies(before + RECEIVES_PER_WORKER +
				is_case("other"));
		printf("answered %u\n", answered - before);
		shared->park[1] = 0;
		if (!ends)
			receive_replies(total_sent());
	}
	if (!ends && !is_case("error"))
		printf("missing %u\n", total_sent() - answered);
	if (!is_case("error"))
		printf("wrong %u\n", wrong);
	fflush(stdout);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	syscall(SYS_exit_group, 0);
}
