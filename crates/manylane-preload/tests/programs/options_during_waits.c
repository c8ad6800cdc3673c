/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the kernel reads when a call starts, and changes while two threads wait
 * in it:
 *
 *	options_during_waits CASE
 *
 * Two threads receive on a UDP socket, until both have received often. Then each
 * waits once, and the main thread changes something:
 *
 * negative: the receive timeout becomes negative. nonblock: the socket becomes
 * non-blocking. shorter: the timeout becomes 50 ms. Prints how many threads
 * returned soon after that, and what they returned once datagrams were sent.
 *
 * longer: threads wait with a timeout, which is taken away. plain: the same,
 * and a socket option is set that lanes cannot have. limit: threads poll more
 * entries than a new limit of open files allows. Prints what they returned
 * after the timeout, and "late" if it was long after that. shutdown: as plain,
 * and then the socket is shut down.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>

#include "warm_up.h"

#define ENTRIES 20
#define TIMEOUT_MS 2000
/* A change shortly before the timeout, and the end of a wait that is late. */
#define CHANGE_MS 1500
#define LATE_MS 3000
#define SOON_MS 150

static const char *what;
static _Atomic unsigned ended, returned;
static _Atomic int end, go;
static _Atomic pid_t tids[WORKERS];
static int answers[WORKERS], errors[WORKERS], is_late[WORKERS];

static int is(const char *name)
{
	return !strcmp(what, name);
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* A sleep that the library does not see. */
static void raw_sleep(long ms)
{
	struct timespec time = { ms / 1000, ms % 1000 * 1000000 };

	syscall(SYS_nanosleep, &time, NULL);
}

static int wait_once(void)
{
	struct pollfd fds[ENTRIES];
	char byte;
	int i;

	if (!is("limit"))
		return recv(server, &byte, 1, 0);
	for (i = 0; i < ENTRIES; i++)
		fds[i] = (struct pollfd){ server, POLLIN, 0 };
	return poll(fds, ENTRIES, TIMEOUT_MS);
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;
	long start;

	while (!end)
		if (recv(server, &byte, 1, 0) == 1)
			count_received(nth);
	tids[nth] = gettid();
	ended++;
	while (!go)
		raw_sleep(1);
	start = now_ms();
	answers[nth] = wait_once();
	errors[nth] = errno;
	is_late[nth] = now_ms() - start > LATE_MS;
	returned++;
	return NULL;
}

/*
 * Waits until a thread sleeps in its receive or poll, as the kernel reports, or
 * one has returned from it.
 */
static void wait_for_sleep(pid_t tid)
{
	long number = -1;

	do {
		char path[64], text[64] = "";
		FILE *file;

		raw_sleep(1);
		snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", tid);
		file = fopen(path, "r");
		if (file && fgets(text, sizeof(text), file) &&
		    strchr("0123456789", *text))
			number = strtol(text, NULL, 10);
		if (file)
			fclose(file);
#ifdef SYS_poll
		number = number == SYS_poll ? SYS_ppoll : number;
#endif
	} while (number != SYS_recvfrom && number != SYS_ppoll && !returned);
}

static void set_timeout(long sec, long usec)
{
	struct timeval time = { sec, usec };

	if (setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)))
		perror("SO_RCVTIMEO");
}

static void set_limit(rlim_t limit)
{
	struct rlimit to;

	getrlimit(RLIMIT_NOFILE, &to);
	to.rlim_cur = limit;
	if (setrlimit(RLIMIT_NOFILE, &to))
		perror("setrlimit");
}

/* The two threads have lanes, and nothing is left in them. */
static void start_workers(void)
{
	char byte;

	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();
	pin_to_this_cpu();
	end = 1;
	while (ended < WORKERS) {
		send_all('x');
		usleep(50);
	}
	wait_for_delivery();
	while (recv(server, &byte, 1, MSG_DONTWAIT) == 1)
		;
}

static void change(void)
{
	int on = 1;

	if (is("negative"))
		set_timeout(-1, 0);
	else if (is("nonblock"))
		fcntl(server, F_SETFL, O_NONBLOCK);
	else if (is("shorter"))
		set_timeout(0, 50000);
	else if (is("longer"))
		set_timeout(0, 0);
	else if (is("limit"))
		set_limit(ENTRIES - 4);
	else
		setsockopt(server, IPPROTO_IP, IP_RECVERR, &on, sizeof(on));
}

/* What the kernel refuses stays refused. */
static void refuse(rlim_t limit, int entries)
{
	struct pollfd fds[ENTRIES];
	int i, answer;

	set_limit(limit);
	for (i = 0; i < entries; i++)
		fds[i] = (struct pollfd){ server, POLLIN, 0 };
	answer = poll(fds, entries, 0);
	printf(", %d of %d: %s", entries, (int)limit,
	       answer < 0 ? strerrorname_np(errno) : "polled");
}

int main(int argc, char **argv)
{
	int i, has_timeout;

	if (argc != 2)
		return 2;
	what = argv[1];
	alarm(300);
	has_timeout = is("longer") || is("plain") || is("shutdown");
	start_workers();
	if (has_timeout)
		set_timeout(TIMEOUT_MS / 1000, 0);
	go = 1;
	for (i = 0; i < WORKERS; i++)
		wait_for_sleep(tids[i]);
	raw_sleep(has_timeout || is("limit") ? CHANGE_MS : SOON_MS);
	change();
	if (is("shutdown"))
		shutdown(server, SHUT_RD);
	if (!has_timeout && !is("limit")) {
		raw_sleep(SOON_MS);
		printf("%u returned, then ", returned);
	}
	while (returned < WORKERS) {
		if (!has_timeout && !is("limit"))
			send_all('x');
		raw_sleep(1);
	}
	for (i = 0; i < WORKERS; i++)
		printf("%s%s%s", i ? " " : "",
		       answers[i] < 0 ? strerrorname_np(errors[i]) :
		       answers[i]     ? "1" :
					"0",
		       is_late[i] ? " late" : "");
	if (is("limit")) {
		refuse(ENTRIES - 1, ENTRIES);
		refuse(ENTRIES, ENTRIES);
		refuse(0, 1);
		refuse(1, 1);
	}
	printf("\n");
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
