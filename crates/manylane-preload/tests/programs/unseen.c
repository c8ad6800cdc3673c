/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Sockets that are closed past the C library, as io_uring does it, and numbers
 * that come to mean something else:
 *
 *	unseen numbers|socket|file|bind|share|waiting|syscall|hidden
 *
 * Everything that is printed is the same with the library as without. With
 * lanes are all but the first.
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

/* A system call that no library sees; a negative answer is the error. */
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

/* A file that no folder has, and its path while it is open. */
static int memory_file(char path[PATH_SIZE])
{
	int fd = memfd_create("unseen", 0);

	if (write(fd, "file", 4) != 4)
		perror("memfd_create");
	snprintf(path, PATH_SIZE, "/proc/self/fd/%d", fd);
	return fd;
}

static void is(const char *what, int fine)
{
	printf("%s: %s\n", what, fine ? "yes" : strerror(errno));
}

/* Reads what is known to be there. */
static void reads(const char *what, int fd, const char *expected)
{
	char data[64] = "", again[64] = "";
	struct iovec pieces = { data, strlen(expected) };

	if (read(fd, again, 0) || readv(fd, &pieces, 1) < 0)
		snprintf(data, sizeof(data), "%s", strerror(errno));
	printf("%s: %s\n", what, data);
}

/* The number of a bound socket that was received on, and is closed unseen. */
static int stale(void)
{
	struct sockaddr_in own;
	int fd = loopback_server(0, &own), i;
	char byte;

	for (i = 0; i < 3; i++) {
		sendto(clients[0], "x", 1, 0, (void *)&own, sizeof(own));
		if (recv(fd, &byte, 1, 0) != 1)
			perror("recv");
	}
	/* What makes numbers may want a lower one first. */
	raw_close(fd);
	return fd;
}

static int listening(struct sockaddr_in *own)
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

static int connected(const struct sockaddr_in *to)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (connect(fd, (void *)to, sizeof(*to)) || send(fd, "tcp", 3, 0) != 3)
		perror("connect");
	return fd;
}

/* Passes a descriptor through a socket; what it is when it comes out. */
static int passed(int fd, int pair[2], int *again)
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
	*again = stale();
	if (recvmsg(pair[1], &message, 0) != 1)
		perror("recvmsg");
	memcpy(&number, CMSG_DATA(&control.header), sizeof(number));
	return number;
}

/* The C library hands out the number of a socket that was closed unseen. */
static void numbers(void)
{
	struct sockaddr_in own;
	struct itimerspec soon = { .it_value = { 0, 1 } };
	uint64_t count = 7;
	char path[PATH_SIZE], data[8] = "";
	int fd, want, pair[2], pipes[2], other[2], listener = listening(&own);
	int made = memory_file(path);
	sigset_t set;

#define OPENS(call)                                      \
	do {                                             \
		want = stale();                          \
		fd = call;                               \
		is(#call " has the number", fd == want); \
		reads(#call, fd, "file");                \
		close(fd);                               \
	} while (0)
	OPENS(open(path, O_RDONLY));
	OPENS(open64(path, O_RDONLY));
	OPENS(openat(AT_FDCWD, path, O_RDONLY));
	OPENS(openat64(AT_FDCWD, path, O_RDONLY));
	OPENS(raw_open(path));
	want = stale();
	fd = creat(path, 0600);
	is("creat", fd == want && write(fd, "made", 4) == 4);
	close(fd);
	OPENS(fileno(fopen(path, "r")));
	close(made);

	want = stale();
	fd = memfd_create("unseen", 0);
	is("memfd_create", fd == want && write(fd, "memory", 6) == 6 &&
				   !lseek(fd, 0, SEEK_SET));
	reads("memfd_create", fd, "memory");
	close(fd);

	want = stale();
	is("pipe",
	   !pipe(pipes) && pipes[0] == want && write(pipes[1], "pipe", 4) == 4);
	reads("pipe", pipes[0], "pipe");
	close(pipes[0]);
	close(pipes[1]);
	want = stale();
	is("pipe2", !pipe2(pipes, O_CLOEXEC) && pipes[0] == want &&
			    write(pipes[1], "pipe", 4) == 4);
	reads("pipe2", pipes[0], "pipe");
	close(pipes[0]);
	close(pipes[1]);

	want = stale();
	is("socketpair", !socketpair(AF_UNIX, SOCK_STREAM, 0, pair) &&
				 pair[0] == want &&
				 write(pair[0], "pair", 4) == 4 &&
				 write(pair[1], "pair", 4) == 4);
	reads("socketpair", pair[0], "pair");
	reads("socketpair", pair[1], "pair");

	connected(&own);
	connected(&own);
	want = stale();
	fd = accept(listener, NULL, NULL);
	is("accept", fd == want && write(fd, "back", 4) == 4);
	reads("accept", fd, "tcp");
	want = stale();
	fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
	is("accept4", fd == want && write(fd, "back", 4) == 4);
	reads("accept4", fd, "tcp");

	want = stale();
	fd = eventfd(5, 0);
	is("eventfd", fd == want && write(fd, &count, 8) == 8 &&
			      read(fd, &count, 8) == 8 && count == 12);
	want = stale();
	fd = timerfd_create(CLOCK_MONOTONIC, 0);
	is("timerfd_create", fd == want &&
				     !timerfd_settime(fd, 0, &soon, NULL) &&
				     read(fd, &count, 8) == 8 && count >= 1);
	want = stale();
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	fd = signalfd(-1, &set, SFD_NONBLOCK);
	is("signalfd", fd == want && read(fd, data, 8) < 0 && errno == EINVAL);
	want = stale();
	fd = inotify_init();
	is("inotify_init",
	   fd == want && inotify_add_watch(fd, "/tmp", IN_CREATE) > 0);
	want = stale();
	fd = inotify_init1(IN_NONBLOCK);
	is("inotify_init1", fd == want && read(fd, data, 8) < 0);

	if (pipe(other) || write(other[1], "rights", 6) != 6)
		perror("pipe");
	fd = passed(other[0], pair, &want);
	is("SCM_RIGHTS", fd == want);
	reads("SCM_RIGHTS", fd, "rights");
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
		total++;
		if (byte == 'P')
			break;
	}
	parked++;
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

/* Three threads have lanes; where they do not poll, they are parked then. */
static void start(void)
{
	pthread_t thread;
	unsigned turn, want;
	long i;

	server = loopback_server(0, &address);
	for (i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker, (void *)i);
	for (turn = 0;
	     turn < 50 || !received[0] || !received[1] || !received[2];
	     turn++) {
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
	/* Each lane has something, but where the threads are awake. */
	for (i = 0; !polls && i < 4 * FLOWS; i++)
		send_one('y');
}

/*
 * Kernel sockets that are bound to the port of the server, by netlink: while
 * others come and go, /proc/net/udp leaves sockets out and shows some twice.
 */
static int bound(void)
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

static void is_free(void)
{
	int fd = raw(SYS_socket, AF_INET, SOCK_DGRAM, 0, 0, 0), i;

	/* A thread in a receive has the socket until its slice is over. */
	for (i = 0; bound() && i < 30000; i++)
		usleep(1000);
	printf("bound to the port: %d\n", bound());
	errno = -raw(SYS_bind, fd, (long)&address, sizeof(address), 0, 0);
	is("the port is free", errno == 0);
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

/* The number means another socket: calls are for that one. */
static void other_socket(void)
{
	struct timeval time = { 0, 40000 };
	struct pollfd at = { .events = POLLIN };
	int pair[2], fd = server, copy, one = 1, value = 0;
	socklen_t len = sizeof(value);
	char data[16] = "";

	raw_close(server);
	raw(SYS_socketpair, AF_UNIX, SOCK_STREAM, 0, (long)pair, 0);
	is("the socket has the number", pair[0] == fd);
	is("an option",
	   !setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)));
	printf("its timeout: %d ms\n", timeout_of(fd));
	is("another one",
	   !setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof(one)) &&
		   !getsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &value, &len) &&
		   value);
	copy = dup(fd);
	is("sent by a copy", send(copy, "copy", 4, 0) == 4);
	is("sent without an address", sendto(fd, "to", 2, 0, NULL, 0) == 2);
	is("received", read(pair[1], data, sizeof(data)) == 6);
	raw(SYS_write, pair[1], (long)"back", 4, 0, 0);
	at.fd = fd;
	is("polled", poll(&at, 1, 1000) == 1 && at.revents == POLLIN);
	reads("read", copy, "back");
	is("connected", connect(fd, (void *)&address, sizeof(address)) < 0 &&
				errno == EINVAL);
	printf("its timeout: %d ms\n", timeout_of(fd));
	is("written", write(fd, "written", 7) == 7 &&
			      read(pair[1], data, sizeof(data)) == 7);
	close(copy);
	close(fd);
	is("closed", raw(SYS_fcntl, fd, F_GETFD, 0, 0, 0) == -EBADF);
	is_free();
}

/* The number means a file. */
static void other_file(void)
{
	char path[PATH_SIZE];
	int made = memory_file(path), fd = server;

	raw_close(server);
	is("the file has the number", raw_open(path) == fd);
	reads("read", fd, "file");
	close(made);
	is_free();
}

/* The program's own files are where lanes were. */
static void hidden(void)
{
	int from, fds[64], count = 0, i;

	/* Where the library puts what it opens is its own business. */
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
	is_free();
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	int i;

	sem_init(&leave, 0, 0);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	if (!strcmp(what, "numbers")) {
		numbers();
		return 0;
	}
	polls = !strcmp(what, "waiting");
	start();
	if (!strcmp(what, "socket")) {
		other_socket();
	} else if (!strcmp(what, "file")) {
		other_file();
	} else if (!strcmp(what, "bind") || !strcmp(what, "share")) {
		int fd = socket(AF_INET, SOCK_DGRAM, 0), one = 1;

		raw_close(server);
		if (!strcmp(what, "share"))
			setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one,
				   sizeof(one));
		is("bound", !bind(fd, (void *)&address, sizeof(address)));
		printf("bound to the port: %d\n", bound());
		stay_here();
		send_one('z');
		settle();
		is("received", recv(fd, &one, 1, MSG_DONTWAIT) == 1);
	} else if (!strcmp(what, "waiting")) {
		raw_close(server);
		for (i = 0; ended < WORKERS && i < 60000; i++)
			usleep(500);
		printf("%u have ended\n", ended);
		is_free();
	} else if (!strcmp(what, "syscall")) {
		syscall(SYS_close, server);
		is_free();
	} else if (!strcmp(what, "hidden")) {
		hidden();
	}
	fflush(stdout);
	_exit(0);
}
