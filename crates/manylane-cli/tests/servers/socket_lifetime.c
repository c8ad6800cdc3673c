/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Sockets that are opened and closed, threads that share one, and signals. */
#include "calls.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static void copies(int port)
{
	int copy, turn, n;

	begin_test("copies", port);
	send_all_numbers();
	copy = dup(server);
	close(server);
	server = copy;
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	close_server();
	/*
	 * Closed with a full queue, also by number; the next socket gets only
	 * its own datagrams.
	 */
	for (turn = 0; turn < 10; turn++) {
		union address local;
		socklen_t len = address(&local, ip4, port);

		open_server(ip4, ip4, port);
		warm_up();
		send_all_numbers();
		if (turn % 2)
			syscall(SYS_close, server);
		else
			close(server);
		server = socket(AF_INET, SOCK_DGRAM, 0);
		CHECK(bind(server, &local.any, len) == 0);
		for (n = 0; n < 20; n++)
			send_number(n);
		CHECK(receive_numbers(server, 0, 20) == 20);
		CHECK(is_empty(server));
		close_server();
	}
}

/* As many sockets as can have queues, repeatedly. */
static void two_at_a_time(int port)
{
	int turn, i, n, two[2], right = 0;

	printf("two at a time\n");
	open_server(ip4, ip4, port);
	close(server);
	for (turn = 0; turn < 10; turn++) {
		for (i = 0; i < 2; i++) {
			to_len = address(&to, ip4, port + i);
			two[i] = socket(AF_INET, SOCK_DGRAM, 0);
			if (bind(two[i], &to.any, to_len))
				fail("bind");
		}
		for (i = 0; i < 2; i++) {
			address(&to, ip4, port + i);
			for (n = 0; n < 3; n++) {
				send_number(n);
				right += receive_numbers(two[i], n, n + 1);
			}
		}
		close(two[0]);
		close(two[1]);
	}
	CHECK(right == 60);
	server = -1;
	close_server();
}

static void few_descriptors(int port)
{
	int more, lowest = -1, leaked = 0;

	for (more = 0; more < 12; more++) {
		struct rlimit limit, before;
		/* At the end enough for queues, and for the reserve. */
		int spare = more < 11 ? more : 200, next;

		printf("%d more descriptors\n", spare);
		open_server(ip4, ip4, port + more);
		next = dup(0);
		close(next);
		getrlimit(RLIMIT_NOFILE, &before);
		limit = before;
		limit.rlim_cur = next + spare;
		if (setrlimit(RLIMIT_NOFILE, &limit))
			fail("setrlimit");
		warm_up();
		send_all_numbers();
		CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) ==
		      QUEUED_DATAGRAMS);
		setrlimit(RLIMIT_NOFILE, &before);
		close_server();
		next = dup(0);
		close(next);
		leaked += lowest >= 0 && next != lowest;
		lowest = next;
	}
	CHECK(leaked == 0);
}

void test_closes(void)
{
	copies(7021);
	few_descriptors(7022);
	two_at_a_time(7034);
}

static int descriptors(void)
{
	DIR *all = opendir("/proc/self/fd");
	int count = 0;

	while (readdir(all))
		count++;
	closedir(all);
	return count;
}

/* More sockets, one after the other, than the library has queues for. */
void test_reopened(int port)
{
	int turn, before = 0;

	printf("reopened\n");
	for (turn = 0; turn < 70; turn++) {
		open_server(ip4, ip4, port);
		warm_up();
		close_server();
		if (turn == 0)
			before = descriptors();
	}
	CHECK(descriptors() == before);
}

/* More than half of the room of two sockets together. */
#define UNREAD 1000

static void fill_unread(void)
{
	int n;

	for (n = 0; n < UNREAD; n++) {
		send_number(n);
		if (n % QUEUED_DATAGRAMS == QUEUED_DATAGRAMS - 1)
			wait_for_arrival();
	}
}

/*
 * A child, the only process with the socket, is killed while it peeks, and
 * stays a zombie. The queue is not affected: the next two sockets have all
 * their room.
 */
void test_killed(int port)
{
	struct timeval bound = { .tv_sec = 100 };
	int two[2], i, room = 4 << 20;
	siginfo_t info;
	pid_t child;
	char byte;

	printf("killed\n");
	open_server(ip4, ip4, port);
	child = fork();
	if (child == 0) {
		warm_up();
		fill_unread();
		recv(server, &byte, 1, MSG_PEEK);
		raise(SIGKILL);
	}
	close(server);
	if (waitid(P_PID, child, &info, WEXITED | WNOWAIT))
		fail("waitid");
	close_server();
	open_server(ip4, ip4, port + 1);
	two[0] = server;
	two[1] = socket(AF_INET, SOCK_DGRAM, 0);
	to_len = address(&to, ip4, port + 2);
	if (setsockopt(two[1], SOL_SOCKET, SO_RCVBUFFORCE, &room,
		       sizeof(room)) ||
	    bind(two[1], &to.any, to_len))
		fail("bind");
	for (i = 0; i < 2; i++) {
		address(&to, ip4, port + 1 + i);
		server = two[i];
		setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &bound,
			   sizeof(bound));
		warm_up();
		fill_unread();
	}
	for (i = 0; i < 2; i++)
		CHECK(receive_numbers(two[i], 0, UNREAD) == UNREAD);
	close(two[0]);
	close_server();
	waitpid(child, NULL, 0);
}

static void *peek(void *arg)
{
	char byte;

	recv(server, &byte, 1, MSG_PEEK);
	return arg;
}

/* A thread ends while it peeks. */
void test_thread_end(int port)
{
	pthread_t thread;

	begin_test("ended", port);
	send_all_numbers();
	pthread_create(&thread, NULL, peek, NULL);
	pthread_join(thread, NULL);
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	CHECK(is_empty(server));
	close_server();
}

/* Threads that wait for the server, each by another call. */
enum {
	BLOCKS,
	POLLS,
	EPOLLS,
	WAIT_CALLS
};

/* Datagrams before they all wait. */
#define WARM_UP_DATAGRAMS 5

static atomic_int received, wrong, ended;
static atomic_uchar seen[QUEUED_DATAGRAMS];
static pthread_barrier_t all_ready;

/* Counts one datagram; true if it was the last for this thread. */
static int count_datagram(const char *data, ssize_t len)
{
	int n;

	if (len == 1) {
		ended++;
		return 1;
	}
	memcpy(&n, data, sizeof(n));
	wrong += n < 0 || n >= QUEUED_DATAGRAMS || !is_number(n, data, len) ||
		 seen[n]++;
	received++;
	return 0;
}

static void *wait_and_receive(void *arg)
{
	int way = (int)(long)arg, epoll = -1, often = 0;
	struct epoll_event event = { .events = EPOLLIN };
	struct pollfd at = { .fd = server, .events = POLLIN };
	char data[2000];
	ssize_t len;

	if (way == EPOLLS) {
		epoll = epoll_create1(EPOLL_CLOEXEC);
		epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	}
	for (;;) {
		if (way == POLLS)
			poll(&at, 1, -1);
		if (way == EPOLLS)
			epoll_wait(epoll, &event, 1, -1);
		len = recv(server, data, sizeof(data),
			   way == BLOCKS ? 0 : MSG_DONTWAIT);
		if (len < 0)
			continue;
		if (count_datagram(data, len))
			break;
		if (++often == WARM_UP_DATAGRAMS)
			pthread_barrier_wait(&all_ready);
	}
	if (epoll >= 0)
		close(epoll);
	return NULL;
}

static void reset_counts(void)
{
	received = 0;
	for (int n = 0; n < QUEUED_DATAGRAMS; n++)
		seen[n] = 0;
}

static void wait_until_received(int count)
{
	while (received < count)
		usleep(200);
}

/*
 * The socket falls back beside threads that wait for it: half of the datagrams
 * arrive before.
 */
static void fallback_beside_threads(int port, int level, int option)
{
	pthread_t thread[WAIT_CALLS];
	int value = 16, n;

	begin_test("threads", port);
	pthread_barrier_init(&all_ready, NULL, WAIT_CALLS + 1);
	wrong = ended = 0;
	reset_counts();
	for (n = 0; n < WAIT_CALLS; n++)
		pthread_create(&thread[n], NULL, wait_and_receive,
			       (void *)(long)n);
	/* A thread that has enough leaves the rest to the others. */
	for (n = 0; n < WAIT_CALLS * WARM_UP_DATAGRAMS; n++) {
		send_number(n);
		wait_until_received(n + 1);
	}
	pthread_barrier_wait(&all_ready);
	usleep(50000);
	reset_counts();
	for (n = 0; n < QUEUED_DATAGRAMS / 2; n++)
		send_number(n);
	CHECK(setsockopt(server, level, option, &value, sizeof(value)) == 0);
	for (; n < QUEUED_DATAGRAMS; n++)
		send_number(n);
	wait_until_received(QUEUED_DATAGRAMS);
	wait_for_arrival();
	usleep(50000);
	CHECK(received == QUEUED_DATAGRAMS && wrong == 0);
	while (ended < WAIT_CALLS) {
		send_by_client(0, "e", 1);
		usleep(1000);
	}
	for (n = 0; n < WAIT_CALLS; n++)
		pthread_join(thread[n], NULL);
	close_server();
}

void test_threads(void)
{
	fallback_beside_threads(7061, SOL_SOCKET, SO_RXQ_OVFL);
	fallback_beside_threads(7062, SOL_IP, IP_TOS);
	fallback_beside_threads(7063, SOL_IP, IP_RECVERR);
}

static pthread_t main_thread;
static atomic_int over, handled;

static void on_signal(int signal)
{
	(void)signal;
	if (++handled == 20)
		send_number(QUEUED_DATAGRAMS);
}

static void on_other(int signal)
{
	(void)signal;
}

static void *send_signals(void *arg)
{
	while (!over) {
		pthread_kill(main_thread, SIGUSR1);
		usleep(1000);
	}
	return arg;
}

static void handle(int signal, void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };

	sigaction(signal, &action, NULL);
}

void test_interrupts(int port)
{
	struct pollfd at = { .events = POLLIN };
	struct timeval long_time = { .tv_sec = 80 };
	char data[2000];
	pthread_t thread;

	main_thread = pthread_self();
	handle(SIGUSR1, on_other, 0);
	begin_test("interrupted", port);
	pthread_create(&thread, NULL, send_signals, NULL);
	CHECK(recv(server, data, sizeof(data), 0) == -1 && errno == EINTR);
	at.fd = server;
	CHECK(poll(&at, 1, -1) == -1 && errno == EINTR);
	setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &long_time,
		   sizeof(long_time));
	CHECK(recv(server, data, sizeof(data), 0) == -1 && errno == EINTR);
	over = 1;
	pthread_join(thread, NULL);
	send_number(0);
	CHECK(receive_numbers(server, 0, 1) == 1);
	close_server();
}

void test_restarts(int port)
{
	pthread_t thread;

	main_thread = pthread_self();
	handle(SIGUSR1, on_signal, SA_RESTART);
	begin_test("restarted", port);
	pthread_create(&thread, NULL, send_signals, NULL);
	CHECK(receive_numbers(server, QUEUED_DATAGRAMS, QUEUED_DATAGRAMS + 1) ==
	      1);
	over = 1;
	pthread_join(thread, NULL);
	CHECK(is_empty(server));
	send_all_numbers();
	/* Now handlers of both kinds are installed. */
	handle(SIGUSR2, on_other, 0);
	check_plain();
	close_server();
}

/* Numbers that the handler has received correctly. */
static volatile int on_stack;

static void on_small_stack(int signal)
{
	static char data[2000];
	ssize_t len;
	int n;

	(void)signal;
	for (n = 0; n < 4; n++) {
		len = recv(server, data, sizeof(data), MSG_DONTWAIT);
		if (len < 0)
			return;
		on_stack += is_number(n, data, len);
	}
}

/*
 * The first receives, after which queues would be leased, are those of a
 * handler on a signal stack of 8 KiB. They are leased at the next receive.
 */
void test_small_stack(int port)
{
	/* The kernel's own part of a signal stack is large on some machines. */
	long size = getauxval(AT_MINSIGSTKSZ) + 4700, page = 4096;
	stack_t stack;
	char *at;
	int n;

	size = size < 2 * page ? 2 * page : (size + page - 1) & -page;
	at = mmap(NULL, page + size, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	/* The page below is inaccessible. */
	mprotect(at, page, PROT_NONE);
	stack = (stack_t){ .ss_sp = at + page, .ss_size = size };
	if (sigaltstack(&stack, NULL))
		fail("sigaltstack");
	handle(SIGUSR1, on_small_stack, SA_ONSTACK);
	printf("small stack\n");
	open_server(ip4, ip4, port);
	for (n = 0; n < 4; n++)
		send_number(n);
	wait_for_arrival();
	raise(SIGUSR1);
	CHECK(on_stack == 4);
	send_number(n);
	CHECK(receive_numbers(server, n, n + 1) == 1);
	send_all_numbers();
	CHECK(receive_numbers(server, 0, QUEUED_DATAGRAMS) == QUEUED_DATAGRAMS);
	close_server();
}
