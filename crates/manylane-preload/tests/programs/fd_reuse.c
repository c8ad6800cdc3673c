/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Sockets that are closed unseen by the C library, as io_uring does it, and
 * numbers that are reused:
 *
 *	fd_reuse numbers|socket|file|bind|share|waiting|syscall|hidden
 *
 * All output is the same with the library as without. All cases except the
 * first have lanes.
 */
#define _GNU_SOURCE
#include "loopback.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#define FLOWS 16
#define WORKERS 3
#define PATH_SIZE 32

static int server, clients[FLOWS], polls;
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], total, parked, ended;
static sem_t leave;

/* Makes a system call that no library sees; a negative answer is the error. */
static long raw(long number, long a, long b, long c, long d, long e)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = 0;
	long answer;

	__asm__ volatile("syscall"
			 : "=a"(answer)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10),
			   "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return answer;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;

	__asm__ volatile("svc 0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
			 : "memory");
	return x0;
#else
#error "say here how a system call is made"
#endif
}

static void raw_close(int fd)
{
	raw(SYS_close, fd, 0, 0, 0, 0);
}

static int raw_open(const char *path)
{
	return raw(SYS_openat, AT_FDCWD, (long)path, O_RDONLY, 0, 0);
}

/*
 * Opens a file without a directory entry, and writes its path, valid while it
 * is open.
 */
static int memory_file(char path[PATH_SIZE])
{
	int fd = memfd_create("unseen", 0);

	if (write(fd, "file", 4) != 4)
		perror("memfd_create");
	snprintf(path, PATH_SIZE, "/proc/self/fd/%d", fd);
	return fd;
}

static void print_check(const char *what, int fine)
{
	printf("%s: %s\n", what, fine ? "yes" : strerror(errno));
}

/* Reads data that is known to be readable. */
static void check_read(const char *what, int fd, const char *expected)
{
	char data[64] = "", again[64] = "";
	struct iovec pieces = { data, strlen(expected) };

	if (read(fd, again, 0) || readv(fd, &pieces, 1) < 0)
		snprintf(data, sizeof(data), "%s", strerror(errno));
	printf("%s: %s\n", what, data);
}

/*
 * Returns the number of a bound socket that was received on, and is closed
 * unseen.
 */
static int open_and_close_unseen(void)
{
	struct sockaddr_in own;
	int fd = loopback_server(0, &own), i;
	char byte;

	for (i = 0; i < 3; i++) {
		sendto(clients[0], "x", 1, 0, (void *)&own, sizeof(own));
		if (recv(fd, &byte, 1, 0) != 1)
			perror("recv");
	}
	/* The next call may want a lower number first. */
	raw_close(fd);
	return fd;
}

static int open_listener(struct sockaddr_in *own)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	socklen_t len = sizeof(*own);

	*own = (struct sockaddr_in){ .sin_family = AF_INET };
	own->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(fd, (void *)own, len) || listen(fd, 8) ||
	    getsockname(fd, (void *)own, &len))
		perror("listen");
	return fd;
}

static int open_connection(const struct sockaddr_in *to)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (connect(fd, (void *)to, sizeof(*to)) || send(fd, "tcp", 3, 0) != 3)
		perror("connect");
	return fd;
}

/* Passes a descriptor through a socket; returns the received one. */
static int pass_descriptor(int fd, int pair[2], int *again)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { .header = { CMSG_LEN(sizeof(int)), SOL_SOCKET,
				  SCM_RIGHTS } };
	char byte = 0;
	struct iovec piece = { &byte, 1 };
	struct msghdr message = { .msg_iov = &piece,
				  .msg_iovlen = 1,
				  .msg_control = &control,
				  .msg_controllen = sizeof(control) };
	int number = -1;

	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	if (sendmsg(pair[0], &message, 0) != 1)
		perror("sendmsg");
	*again = open_and_close_unseen();
	if (recvmsg(pair[1], &message, 0) != 1)
		perror("recvmsg");
	memcpy(&number, CMSG_DATA(&control.header), sizeof(number));
	return number;
}

/* The C library reuses the number of a socket that was closed unseen. */
static void test_numbers(void)
{
	struct sockaddr_in own;
	struct itimerspec soon = { .it_value = { 0, 1 } };
	uint64_t count = 7;
	char path[PATH_SIZE], data[8] = "";
	int fd, want, pair[2], pipes[2], other[2],
		listener = open_listener(&own);
	int made = memory_file(path);
	sigset_t set;

#define OPENS(call)                                               \
	do {                                                      \
		want = open_and_close_unseen();                   \
		fd = call;                                        \
		print_check(#call " has the number", fd == want); \
		check_read(#call, fd, "file");                    \
		close(fd);                                        \
	} while (0)
	OPENS(open(path, O_RDONLY));
	OPENS(open64(path, O_RDONLY));
	OPENS(openat(AT_FDCWD, path, O_RDONLY));
	OPENS(openat64(AT_FDCWD, path, O_RDONLY));
	OPENS(raw_open(path));
	want = open_and_close_unseen();
	fd = creat(path, 0600);
	print_check("creat", fd == want && write(fd, "made", 4) == 4);
	close(fd);
	OPENS(fileno(fopen(path, "r")));
	close(made);

	want = open_and_close_unseen();
	fd = memfd_create("unseen", 0);
	print_check("memfd_create", fd == want && write(fd, "memory", 6) == 6 &&
					    !lseek(fd, 0, SEEK_SET));
	check_read("memfd_create", fd, "memory");
	close(fd);

	want = open_and_close_unseen();
	print_check("pipe", !pipe(pipes) && pipes[0] == want &&
				    write(pipes[1], "pipe", 4) == 4);
	check_read("pipe", pipes[0], "pipe");
	close(pipes[0]);
	close(pipes[1]);
	want = open_and_close_unseen();
	print_check("pipe2", !pipe2(pipes, O_CLOEXEC) && pipes[0] == want &&
				     write(pipes[1], "pipe", 4) == 4);
	check_read("pipe2", pipes[0], "pipe");
	close(pipes[0]);
	close(pipes[1]);

	want = open_and_close_unseen();
	print_check("socketpair", !socketpair(AF_UNIX, SOCK_STREAM, 0, pair) &&
					  pair[0] == want &&
					  write(pair[0], "pair", 4) == 4 &&
					  write(pair[1], "pair", 4) == 4);
	check_read("socketpair", pair[0], "pair");
	check_read("socketpair", pair[1], "pair");

	open_connection(&own);
	open_connection(&own);
	want = open_and_close_unseen();
	fd = accept(listener, NULL, NULL);
	print_check("accept", fd == want && write(fd, "back", 4) == 4);
	check_read("accept", fd, "tcp");
	want = open_and_close_unseen();
	fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
	print_check("accept4", fd == want && write(fd, "back", 4) == 4);
	check_read("accept4", fd, "tcp");

	want = open_and_close_unseen();
	fd = eventfd(5, 0);
	print_check("eventfd", fd == want && write(fd, &count, 8) == 8 &&
				       read(fd, &count, 8) == 8 && count == 12);
	want = open_and_close_unseen();
	fd = timerfd_create(CLOCK_MONOTONIC, 0);
	print_check("timerfd_create",
		    fd == want && !timerfd_settime(fd, 0, &soon, NULL) &&
			    read(fd, &count, 8) == 8 && count >= 1);
	want = open_and_close_unseen();
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	fd = signalfd(-1, &set, SFD_NONBLOCK);
	print_check("signalfd",
		    fd == want && read(fd, data, 8) < 0 && errno == EINVAL);
	want = open_and_close_unseen();
	fd = inotify_init();
	print_check("inotify_init",
		    fd == want && inotify_add_watch(fd, "/tmp", IN_CREATE) > 0);
	want = open_and_close_unseen();
	fd = inotify_init1(IN_NONBLOCK);
	print_check("inotify_init1", fd == want && read(fd, data, 8) < 0);

	if (pipe(other) || write(other[1], "rights", 6) != 6)
		perror("pipe");
	fd = pass_descriptor(other[0], pair, &want);
	print_check("SCM_RIGHTS", fd == want);
	check_read("SCM_RIGHTS", fd, "rights");
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	for (;;) {
		struct pollfd at = { .fd = server, .events = POLLIN };
		ssize_t got;

		if (polls)
			poll(&at, 1, 50);
		got = recv(server, &byte, 1, polls ? MSG_DONTWAIT : 0);
		if (got < 0 && errno == EBADF)
			break;
		if (got < 0)
			continue;
		received[nth]++;
		/* Before it is counted: then no more is sent to park it. */
		parked += byte == 'P';
		total++;
		if (byte == 'P')
			break;
	}
	if (!polls)
		sem_wait(&leave);
	ended++;
	return NULL;
}

static void send_one(char byte)
{
	static unsigned flow;

	if (sendto(clients[flow++ % FLOWS], &byte, 1, 0, (void *)&address,
		   sizeof(address)) != 1)
		perror("sendto");
}

/* Gives three threads lanes; unless they poll, they are then parked. */
static void start_and_park(void)
{
	pthread_t thread;
	unsigned round, want;
	long i;

	server = loopback_server(0, &address);
	for (i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker, (void *)i);
	for (round = 0;
	     round < 50 || !received[0] || !received[1] || !received[2];
	     round++) {
		want = total + FLOWS;
		for (i = 0; i < FLOWS; i++)
			send_one('x');
		while (total < want)
			usleep(50);
	}
	while (!polls && parked < WORKERS) {
		want = total + 1;
		send_one('P');
		while (total < want)
			usleep(50);
	}
	/* Queues a datagram in each lane, unless the threads are awake. */
	for (i = 0; !polls && i < 4 * FLOWS; i++)
		send_one('y');
}

/*
 * Counts the kernel sockets that are bound to the server's port, by netlink:
 * while others are opened and closed, /proc/net/udp omits sockets and shows
 * some twice.
 */
static int count_bound(void)
{
	struct {
		struct nlmsghdr header;
		struct inet_diag_req_v2 about;
	} ask = { { .nlmsg_len = sizeof(ask),
		    .nlmsg_type = SOCK_DIAG_BY_FAMILY,
		    .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP },
		  { .sdiag_family = AF_INET,
		    .sdiag_protocol = IPPROTO_UDP,
		    .idiag_states = ~0u,
		    .id.idiag_sport = address.sin_port } };
	int fd = raw(SYS_socket, AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG, 0, 0);
	int count = 0, ended = 0;

	raw(SYS_sendto, fd, (long)&ask, sizeof(ask), 0, 0);
	while (!ended) {
		_Alignas(struct nlmsghdr) char answer[16384];
		struct nlmsghdr *at = (void *)answer;
		long left = raw(SYS_recvfrom, fd, (long)answer, sizeof(answer),
				0, 0);

		ended = left <= 0;
		for (; NLMSG_OK(at, left); at = NLMSG_NEXT(at, left)) {
			struct inet_diag_msg *about = NLMSG_DATA(at);

			if (at->nlmsg_type == SOCK_DIAG_BY_FAMILY)
				count += about->id.idiag_src[0] ==
					 address.sin_addr.s_addr;
			else
				ended = 1;
			if (at->nlmsg_type == NLMSG_ERROR)
				count = -1;
		}
	}
	raw_close(fd);
	return count;
}

static void check_free(void)
{
	int fd = raw(SYS_socket, AF_INET, SOCK_DGRAM, 0, 0, 0), i;

	/* A thread in a receive holds the socket until its slice is over. */
	for (i = 0; count_bound() && i < 100000; i++)
		usleep(1000);
	printf("bound to the port: %d\n", count_bound());
	errno = -raw(SYS_bind, fd, (long)&address, sizeof(address), 0, 0);
	print_check("the port is free", errno == 0);
	raw_close(fd);
}

static int timeout_of(int fd)
{
	struct timeval time = { 0 };
	socklen_t len = sizeof(time);

	raw(SYS_getsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, (long)&time,
	    (long)&len);
	return time.tv_sec * 1000 + time.tv_usec / 1000;
}

/* The number is another socket's: calls are for that one. */
static void test_other_socket(void)
{
	struct timeval time = { 0, 40000 };
	struct pollfd at = { .events = POLLIN };
	int pair[2], fd = server, copy, one = 1, value = 0;
	socklen_t len = sizeof(value);
	char data[16] = "";

	raw_close(server);
	raw(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, (long)pair, 0);
	print_check("the socket has the number", pair[0] == fd);
	print_check("an option", !setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time,
					     sizeof(time)));
	printf("its timeout: %d ms\n", timeout_of(fd));
	print_check(
		"another one",
		!setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof(one)) &&
			!getsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &value,
				    &len) &&
			value);
	copy = dup(fd);
	print_check("sent by a copy", send(copy, "copy", 4, 0) == 4);
	print_check("sent without an address",
		    sendto(fd, "to", 2, 0, NULL, 0) == 2);
	print_check("received", read(pair[1], data, sizeof(data)) == 6);
	raw(SYS_write, pair[1], (long)"back", 4, 0, 0);
	at.fd = fd;
	print_check("polled", poll(&at, 1, 1000) == 1 && at.revents == POLLIN);
	check_read("read", copy, "back");
	print_check("connected",
		    connect(fd, (void *)&address, sizeof(address)) < 0 &&
			    errno == EINVAL);
	printf("its timeout: %d ms\n", timeout_of(fd));
	print_check("written", write(fd, "written", 7) == 7 &&
				       read(pair[1], data, sizeof(data)) == 7);
	close(copy);
	close(fd);
	print_check("closed", raw(SYS_fcntl, fd, F_GETFD, 0, 0, 0) == -EBADF);
	check_free();
}

/* The number is a file's. */
static void test_other_file(void)
{
	char path[PATH_SIZE];
	int made = memory_file(path), fd = server;

	raw_close(server);
	print_check("the file has the number", raw_open(path) == fd);
	check_read("read", fd, "file");
	close(made);
	check_free();
}

/* The program's own files have numbers that lanes had. */
static void test_hidden(void)
{
	int from, fds[64], count = 0, i;

	/* The library may choose any number for what it opens. */
	for (from = 64; from < 4096; from++) {
		if (raw(SYS_fcntl, from, F_GETFD, 0, 0, 0) < 0)
			continue;
		raw_close(from);
		fds[count] = fcntl(1, F_DUPFD, from);
		if (fds[count] == from)
			count++;
	}
	close(server);
	for (i = 0; i < count; i++)
		if (raw(SYS_fcntl, fds[i], F_GETFD, 0, 0, 0) < 0)
			printf("the library has closed %d\n", fds[i]);
	check_free();
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	int i;

	sem_init(&leave, 0, 0);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	if (!strcmp(what, "numbers")) {
		test_numbers();
		return 0;
	}
	polls = !strcmp(what, "waiting");
	start_and_park();
	if (!strcmp(what, "socket")) {
		test_other_socket();
	} else if (!strcmp(what, "file")) {
		test_other_file();
	} else if (!strcmp(what, "bind") || !strcmp(what, "share")) {
		int fd = socket(AF_INET, SOCK_DGRAM, 0), one = 1;

		raw_close(server);
		if (!strcmp(what, "share"))
			setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one,
				   sizeof(one));
		print_check("bound",
			    !bind(fd, (void *)&address, sizeof(address)));
		printf("bound to the port: %d\n", count_bound());
		pin_to_this_cpu();
		send_one('z');
		wait_for_delivery();
		print_check("received", recv(fd, &one, 1, MSG_DONTWAIT) == 1);
	} else if (!strcmp(what, "waiting")) {
		raw_close(server);
		for (i = 0; ended < WORKERS && i < 100000; i++)
			usleep(1000);
		printf("%u have ended\n", ended);
		check_free();
	} else if (!strcmp(what, "syscall")) {
		syscall(SYS_close, server);
		check_free();
	} else if (!strcmp(what, "hidden")) {
		test_hidden();
	}
	fflush(stdout);
	_exit(0);
}
