/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Waits on small stacks: stacks thread|handler|plain
 *
 * Datagrams arrive for the lane of a thread that stays away. They are waited
 * for by a thread with the smallest possible stack, or by a handler of a thread
 * with a lane, on a signal stack of 8 KiB: by poll, select and epoll_wait, and
 * by poll and select with 600 other descriptors. Prints how many each received,
 * which is all. plain: the handler sets IP_RECVERR first, which makes the
 * socket plain.
 */
#define _GNU_SOURCE
#include "lane_owners.h"
#include <limits.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>

#define DATAGRAMS 20
#define OTHERS 600
#define PAGE 4096L
/* The kernel's own part of a signal stack is large on some machines. */
#define HANDLER_STACK 8192L
#define STACK_LEFT 4700L

static int epoll, pipes[2], others[OTHERS];
static struct pollfd fds[OTHERS + 1];
static fd_set set;
static struct epoll_event event;
static int counts[5];
static _Atomic int ended;
static int makes_plain;

static int is_reported(int how)
{
	int i, many = how > 2 ? OTHERS : 0, top = server;

	if (how == 2)
		return epoll_wait(epoll, &event, 1, -1) == 1;
	if (how % 3 == 0) {
		for (i = 0; i < many; i++)
			fds[i] = (struct pollfd){ .fd = others[i],
						  .events = POLLIN };
		fds[i] = (struct pollfd){ .fd = server, .events = POLLIN };
		return poll(fds, i + 1, -1) == 1 && fds[i].revents == POLLIN;
	}
	FD_ZERO(&set);
	FD_SET(server, &set);
	for (i = 0; i < many; i++) {
		FD_SET(others[i], &set);
		top = top > others[i] ? top : others[i];
	}
	return select(top + 1, &set, NULL, NULL, NULL) == 1 &&
	       FD_ISSET(server, &set);
}

static void wait_for_all(void)
{
	char data[64];
	int how;

	for (how = 0; how < 5; how++)
		while (counts[how] < DATAGRAMS && is_reported(how))
			if (recv(server, data, sizeof(data), MSG_DONTWAIT) > 0)
				counts[how]++;
}

static void *thread(void *arg)
{
	wait_for_all();
	return arg;
}

static void handler(int signal)
{
	int on = 1;

	(void)signal;
	if (makes_plain)
		setsockopt(server, IPPROTO_IP, IP_RECVERR, &on, sizeof(on));
	wait_for_all();
}

/* Maps memory with an inaccessible page below it. */
static void *map_guarded(long size)
{
	char *at = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	mprotect(at, PAGE, PROT_NONE);
	return at + PAGE;
}

static void on_small_stack(void)
{
	long size = sysconf(_SC_THREAD_STACK_MIN);
	pthread_attr_t how;
	pthread_t id;

	size = (size + PAGE - 1) & -PAGE;
	pthread_attr_init(&how);
	if (pthread_attr_setstack(&how, map_guarded(size), size) ||
	    pthread_create(&id, &how, thread, NULL))
		perror("thread");
	else
		pthread_join(id, NULL);
}

static void in_handler(void)
{
	long size = getauxval(AT_MINSIGSTKSZ) + STACK_LEFT;
	struct sigaction action = { .sa_handler = handler,
				    .sa_flags = SA_ONSTACK };
	stack_t stack;

	size = size < HANDLER_STACK ? HANDLER_STACK : (size + PAGE - 1) & -PAGE;
	stack = (stack_t){ .ss_sp = map_guarded(size), .ss_size = size };
	if (sigaltstack(&stack, NULL) || sigaction(SIGUSR1, &action, NULL))
		perror("handler");
	raise(SIGUSR1);
}

static void handle(unsigned nth, const struct payload *payload,
		   const struct sockaddr_in *from)
{
	(void)nth, (void)payload, (void)from;
	in_handler();
	ended = 1;
	for (;;)
		raw_sleep();
}

int main(int argc, char **argv)
{
	int i, how;

	if (argc != 2 || pipe(pipes))
		return 2;
	makes_plain = *argv[1] == 'p';
	start_and_park();
	pin_to_this_cpu();
	for (i = 0; i < OTHERS; i++)
		others[i] = dup(pipes[0]);
	epoll = epoll_create1(0);
	event = (struct epoll_event){ .events = EPOLLIN };
	epoll_ctl(epoll, EPOLL_CTL_ADD, server, &event);
	for (how = 0; how < 5; how++)
		for (i = 0; i < DATAGRAMS; i++)
			send_one('x', nth_flow(0, i), i);
	if (*argv[1] == 't') {
		wait_for_delivery();
		on_small_stack();
	} else {
		/* This datagram starts it. */
		send_one('x', nth_flow(1, 0), 0);
		wait_for_delivery();
		park[1] = 0;
		while (!ended)
			raw_sleep();
	}
	for (how = 0; how < 5; how++)
		printf("%d ", counts[how]);
	printf("of %d\n", DATAGRAMS);
	fflush(stdout);
	syscall(SYS_exit_group, 0);
}
