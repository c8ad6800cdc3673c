/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server that allows itself only the system calls that it makes:
 *
 *	seccomp CASE WAIT SOCKETS
 *
 * Any other call kills the process. WAIT is the call by which it waits: poll,
 * select, epoll, recvfrom. A client, which is not confined, counts the answers.
 * SOCKETS is the number of sockets on the server's port before the filter is
 * installed: 1, or with lanes as many as there are threads.
 *
 *	prctl	one thread, by prctl(2); ends by exit()
 *	seccomp	the same by seccomp(2)
 *	forks	one thread, which then forks a child that serves, and one
 *		that ends at once
 *	workers	two forked processes, each of which confines itself
 *	bind	before the socket is bound
 *	query	only queries whether there are filters, then serves
 *	waiting	two threads, and datagrams in the queue of each socket; by
 *		the main thread, for all threads
 *	blocked	two threads that wait; by the main thread, for all threads
 *	partial	two threads, one of which confines only itself
 *	arguments	as waiting, with calls that the kernel refuses
 *	close, fclose, dup3, close_range, closefrom
 *		as waiting, for threads that close the socket before they receive,
 *		by that call
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "loopback.h"

/* Each of two lanes gets some of them. */
#define FLOWS 32
#define WORKERS 2

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#endif

static const char *test_case, *wait_call;
static bool closes;
static int server, to_client, from_client;
static struct sockaddr_in address;
static pthread_barrier_t held, filled, released;
static _Atomic unsigned received[WORKERS];
static _Atomic int held_workers;

/* AddressSanitizer starts a process at the end that checks for leaks. */
const char *__asan_default_options(void)
{
	return "detect_leaks=0";
}

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* A command for the client, which it acknowledges when it is done. */
struct run_command {
	char what; /* x: is answered; q: stays queued; H, S: for threads; e: the end */
	int count;
};

static void client(int in, int out)
{
	int fds[FLOWS], flow = 0, i, sent = 0, answered = 0;
	struct pollfd server_ends = { .fd = in };
	struct run_command run_command;

	for (i = 0; i < FLOWS; i++)
		fds[i] = socket(AF_INET, SOCK_DGRAM, 0);
	if (read(in, &address, sizeof(address)) != sizeof(address))
		fail("address");
	while (read(in, &run_command, sizeof(run_command)) ==
	       sizeof(run_command)) {
		char what = run_command.what == 'q' || run_command.what == 'e' ?
				    'x' :
				    run_command.what;

		for (i = 0; i < run_command.count; i++) {
			if (sendto(fds[flow++ % FLOWS], &what, 1, 0,
				   (void *)&address, sizeof(address)) != 1)
				fail("sendto");
			sent += what == 'x';
		}
		while (strchr("xe", run_command.what) && answered < sent) {
			struct pollfd at[FLOWS];
			char data;

			for (i = 0; i < FLOWS; i++)
				at[i] = (struct pollfd){ .fd = fds[i],
							 .events = POLLIN };
			if (poll(at, FLOWS, 100000) < 1)
				break;
			for (i = 0; i < FLOWS; i++)
				while (recv(fds[i], &data, 1, MSG_DONTWAIT) ==
				       1)
					answered++;
		}
		if (run_command.what == 'e') {
			printf("%d missing\n", sent - answered);
			fflush(stdout);
			/* Until the server ends: see hold_workers(). */
			do {
				sendto(fds[0], "S", 1, 0, (void *)&address,
				       sizeof(address));
			} while (!poll(&server_ends, 1, 1));
			exit(0);
		}
		if (write(out, &run_command.what, 1) != 1)
			break;
	}
	exit(0);
}

static bool is_range(void)
{
	return !strcmp(test_case, "close_range") ||
	       !strcmp(test_case, "closefrom");
}

static void send_command(char what, int count)
{
	struct run_command run_command = { .what = what, .count = count };

	if (write(to_client, &run_command, sizeof(run_command)) !=
	    sizeof(run_command))
		fail("tell");
}

static void run_command(char what, int count)
{
	char done;

	send_command(what, count);
	if (read(from_client, &done, 1) != 1)
		fail("order");
}

/* Counts the sockets on the server's port, and those with queued datagrams. */
static int count_sockets(int *full)
{
	FILE *file = fopen("/proc/net/udp", "r");
	unsigned local, port, queued;
	char line[256];
	int count = 0;

	*full = 0;
	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, " %*d: %x:%x %*x:%*x %*x %*x:%x", &local,
			   &port, &queued) != 3 ||
		    port != ntohs(address.sin_port))
			continue;
		count++;
		*full += queued > 0;
	}
	fclose(file);
	return count;
}

static void confine(const int *calls, int count, int by_call, int flags)
{
	struct sock_filter code[64] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, arch)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, nr)),
	};
	struct sock_fprog program = { .filter = code };
	int at = 4, i;

	for (i = 0; i < count; i++) {
		code[at++] = (struct sock_filter)BPF_JUMP(
			BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
		code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
							  SECCOMP_RET_ALLOW);
	}
	code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
						  SECCOMP_RET_KILL_PROCESS);
	program.len = at;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		fail("no new privileges");
	if (by_call ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags,
			      &program) :
		      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		fail("filter");
	/* The same once more, by another call. */
	if (by_call &&
	    syscall(SYS_prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		fail("second filter");
}

/* Allows the calls that the server makes from now on, and no others. */
static void confine_to_used_calls(int by_call, int flags)
{
	int calls[24], count = 0;

	calls[count++] = SYS_recvfrom;
	calls[count++] = SYS_sendto;
	calls[count++] = SYS_write;
	calls[count++] = SYS_exit_group;
	if (by_call)
		calls[count++] = SYS_prctl;
	if (!strcmp(wait_call, "poll"))
#ifdef SYS_poll
		calls[count++] = SYS_poll;
#else
		calls[count++] = SYS_ppoll;
#endif
	if (!strcmp(wait_call, "select"))
		calls[count++] = SYS_pselect6;
	if (!strcmp(wait_call, "epoll"))
#ifdef SYS_epoll_wait
		calls[count++] = SYS_epoll_wait;
#else
		calls[count++] = SYS_epoll_pwait;
#endif
	if (!strcmp(test_case, "forks")) {
		calls[count++] = SYS_clone;
		calls[count++] = SYS_set_robust_list;
		calls[count++] = SYS_wait4;
	}
	if (!strcmp(test_case, "bind")) {
		calls[count++] = SYS_socket;
		calls[count++] = SYS_bind;
		calls[count++] = SYS_getsockname;
		calls[count++] = SYS_epoll_create1;
		calls[count++] = SYS_epoll_ctl;
	}
	if (closes) {
		calls[count++] = !strcmp(test_case, "dup3") ? SYS_dup3 :
				 is_range()		    ? SYS_close_range :
							      SYS_close;
		calls[count++] = SYS_socket;
		calls[count++] = SYS_bind;
	}
	if (!strcmp(test_case, "arguments")) {
		calls[count++] = SYS_ioctl;
#ifdef SYS_poll
		calls[count++] = SYS_poll;
#else
		calls[count++] = SYS_ppoll;
#endif
	}
	/* Calls of threads that wait for each other and end. */
	if (flags || !strcmp(test_case, "partial")) {
		calls[count++] = SYS_futex;
		calls[count++] = SYS_rt_sigprocmask;
		calls[count++] = SYS_madvise;
		calls[count++] = SYS_munmap;
		calls[count++] = SYS_exit;
	}
#ifdef SANITIZED
	/*
	 * Calls of the sanitizer's runtime at the end, and in its own thread.
	 */
	calls[count++] = SYS_clock_gettime;
	calls[count++] = SYS_gettimeofday;
	calls[count++] = SYS_mmap;
	calls[count++] = SYS_nanosleep;
	calls[count++] = SYS_sigaltstack;
#endif
	confine(calls, count, by_call, flags);
}

static int make_epoll(int fd)
{
	struct epoll_event event = { .events = EPOLLIN };
	int epfd = epoll_create1(0);

	if (epfd < 0 || epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &event))
		fail("epoll");
	return epfd;
}

static void wait_for_datagram(int fd, int epfd)
{
	if (!strcmp(wait_call, "poll")) {
		struct pollfd at = { .fd = fd, .events = POLLIN };

		if (poll(&at, 1, -1) != 1 || at.revents != POLLIN)
			fail("poll");
	} else if (!strcmp(wait_call, "select")) {
		fd_set read;

		FD_ZERO(&read);
		FD_SET(fd, &read);
		if (select(fd + 1, &read, NULL, NULL, NULL) != 1 ||
		    !FD_ISSET(fd, &read))
			fail("select");
	} else if (!strcmp(wait_call, "epoll")) {
		struct epoll_event event;

		if (epoll_wait(epfd, &event, 1, -1) != 1)
			fail("epoll_wait");
	}
}

/* Answers `count` datagrams, or all until a command arrives. */
static char serve(int fd, int epfd, int count, _Atomic unsigned *counter)
{
	int flags = strcmp(wait_call, "recvfrom") ? MSG_DONTWAIT : 0;

	while (count) {
		struct sockaddr_in from;
		socklen_t len = sizeof(from);
		char data;
		ssize_t got;

		wait_for_datagram(fd, epfd);
		while (count && (got = recvfrom(fd, &data, 1, flags,
						(void *)&from, &len)) == 1) {
			if (data != 'x')
				return data;
			if (counter)
				(*counter)++;
			if (sendto(fd, &data, 1, 0, (void *)&from, len) != 1)
				fail("answer");
			count--;
		}
		if (count && got < 0 && errno != EAGAIN)
			fail("recvfrom");
	}
	return 0;
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	int epfd = strcmp(wait_call, "epoll") ? -1 : make_epoll(server);
	char what;

	while ((what = serve(server, epfd, -1, &received[nth])) != 'S') {
		held_workers++;
		pthread_barrier_wait(&held);
		pthread_barrier_wait(&filled);
		if (!strcmp(test_case, "partial") && nth == 0)
			confine_to_used_calls(1, 0);
		pthread_barrier_wait(&released);
		if (closes)
			break;
	}
	return NULL;
}

/*
 * Stops the workers, one after the other. Of two datagrams that arrive at once,
 * the thread that receives the first also moves the second to the socket's
 * reader queue. A thread that was about to sleep then does not see it and is
 * not woken until another one arrives (__skb_recv_udp() in net/ipv4/udp.c).
 */
static void hold_workers(void)
{
	int i;

	for (i = 0; i < WORKERS; i++) {
		run_command('H', 1);
		while (held_workers <= i)
			usleep(100);
	}
	pthread_barrier_wait(&held);
}

/* The kernel refuses these calls, and reads no memory for them. */
static void test_arguments(void)
{
	static struct pollfd none = { .fd = -1 };
	/* Hidden from the compiler. */
	struct pollfd *volatile fds = &none;
	int *volatile nowhere = NULL;

	if (ioctl(server, FIONREAD, nowhere) != -1 || errno != EFAULT)
		_exit(9);
	if (poll(fds, 1UL << 31, 0) != -1 || errno != EINVAL)
		_exit(10);
}

static void run_threads(int wanted)
{
	FILE *file = fdopen(server, "r");
	pthread_t threads[WORKERS];
	int i, full;

	pthread_barrier_init(&held, NULL, WORKERS + 1);
	pthread_barrier_init(&filled, NULL, WORKERS + 1);
	pthread_barrier_init(&released, NULL, WORKERS + 1);
	for (i = 0; i < WORKERS; i++)
		pthread_create(&threads[i], NULL, worker,
			       (void *)(unsigned long)i);
	do
		run_command('x', FLOWS);
	while (count_sockets(&full) != wanted || !received[0] || !received[1]);
	if (strcmp(test_case, "blocked")) {
		hold_workers();
		do {
			int tries = 0;

			run_command('q', FLOWS);
			/*
			 * They may be delivered late. Sends only few more,
			 * because no queue has room for many.
			 */
			while ((count_sockets(&full) != wanted ||
				full != wanted) &&
			       tries++ < 1000)
				usleep(1000);
		} while (count_sockets(&full) != wanted || full != wanted);
		pthread_barrier_wait(&filled);
	}
	if (strcmp(test_case, "partial"))
		confine_to_used_calls(1, SECCOMP_FILTER_FLAG_TSYNC);
	if (!strcmp(test_case, "arguments"))
		test_arguments();
	if (strcmp(test_case, "blocked"))
		pthread_barrier_wait(&released);
	if (!closes)
		send_command('e', 4 * FLOWS);
	for (i = 0; i < WORKERS; i++)
		pthread_join(threads[i], NULL);
	if (!closes)
		return;
	/* Datagrams for the old socket must not reach the new one. */
	if (!strcmp(test_case, "fclose"))
		fclose(file);
	else if (!strcmp(test_case, "dup3"))
		dup3(to_client, server, 0);
	else if (!strcmp(test_case, "close_range"))
		close_range(server, server, 0);
	else if (!strcmp(test_case, "closefrom"))
		closefrom(server);
	else
		close(server);
	server = socket(AF_INET, SOCK_DGRAM, 0);
	if (server < 0 || bind(server, (void *)&address, sizeof(address)))
		_exit(3);
	if (recv(server, &full, 1, MSG_DONTWAIT) != -1)
		_exit(4);
}

static void run_workers(void)
{
	int i, status;

	for (i = 0; i < WORKERS; i++) {
		if (!fork()) {
			int epfd = strcmp(wait_call, "epoll") ?
					   -1 :
					   make_epoll(server);

			confine_to_used_calls(0, 0);
			_exit(serve(server, epfd, -1, NULL) != 'S');
		}
	}
	send_command('e', 4 * FLOWS);
	for (i = 0; i < WORKERS; i++)
		if (wait(&status) < 0 || status)
			_exit(8);
}

static void serve_alone(void)
{
	int before_bind = !strcmp(test_case, "bind"), epfd = -1;

	if (before_bind)
		confine_to_used_calls(0, 0);
	server = loopback_server(0, &address);
	if (write(to_client, &address, sizeof(address)) != sizeof(address))
		fail("address");
	if (!strcmp(wait_call, "epoll"))
		epfd = make_epoll(server);
	send_command('q', 8);
	serve(server, epfd, 8, NULL);
	if (!strcmp(test_case, "query")) {
		if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL) != -1 ||
		    errno != EFAULT)
			fail("a question");
		if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
			    SECCOMP_FILTER_FLAG_TSYNC, NULL) != -1 ||
		    errno != EFAULT)
			fail("a question");
		if (syscall(SYS_seccomp, SECCOMP_SET_MODE_STRICT, 1, NULL) !=
			    -1 ||
		    errno != EINVAL)
			fail("a question");
	} else if (!before_bind) {
		confine_to_used_calls(!strcmp(test_case, "seccomp"), 0);
	}
	send_command('e', 64);
	if (!strcmp(test_case, "forks")) {
		pid_t child;
		int status;

		child = fork();
		if (!child)
			_exit(0);
		if (waitpid(child, &status, 0) != child || status)
			_exit(5);
		child = fork();
		if (!child) {
			serve(server, epfd, 32, NULL);
			exit(0);
		}
		if (waitpid(child, &status, 0) != child || status)
			_exit(6);
	}
	if (serve(server, epfd, -1, NULL) != 'S')
		_exit(7);
}

int main(int argc, char **argv)
{
	int down[2], up[2];
	pid_t child;

	if (argc != 4)
		return 2;
	test_case = argv[1];
	closes = !strcmp(test_case, "close") || !strcmp(test_case, "fclose") ||
		 !strcmp(test_case, "dup3") || is_range();
	wait_call = argv[2];
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (pipe(down) || pipe(up))
		fail("pipe");
	child = fork();
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(down[1]);
		close(up[0]);
		client(down[0], up[1]);
	}
	to_client = down[1];
	from_client = up[0];
	if (!strcmp(test_case, "waiting") || !strcmp(test_case, "blocked") ||
	    !strcmp(test_case, "partial") || closes ||
	    !strcmp(test_case, "arguments") || !strcmp(test_case, "workers")) {
		server = loopback_server(0, &address);
		/* Above the descriptors of the library. */
		if (!strcmp(test_case, "closefrom")) {
			int low = server;

			server = fcntl(low, F_DUPFD, FD_SETSIZE - 1);
			close(low);
		}
		if (write(to_client, &address, sizeof(address)) !=
		    sizeof(address))
			fail("address");
		if (!strcmp(test_case, "workers"))
			run_workers();
		else
			run_threads(atoi(argv[3]));
	} else {
		serve_alone();
	}
	exit(0);
}
