/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps that open, copy, pass and close descriptors. */
#include "differential.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

/* Puts a new descriptor into a slot, whatever the slot contained. */
static void store_fd(struct step *step, int at, long fd)
{
	if (at < step->args && step->arg[at].slot >= 0 && fd >= 0)
		slots[step->arg[at].slot] = (int)fd;
}

void store_new_fd(struct step *step, int at, long fd)
{
	print_result(fd);
	store_fd(step, at, fd);
}

/* The same for two new descriptors. */
static void store_fd_pair(struct step *step, int done, const int fds[2])
{
	print_result(done);
	if (done < 0)
		return;
	print(" %d %d", fds[0], fds[1]);
	store_fd(step, 0, fds[0]);
	store_fd(step, 1, fds[1]);
}

static void step_pair(struct step *step)
{
	int fds[2];

	store_fd_pair(step,
		      socketpair(AF_UNIX, (int)ARG(2) | SOCK_NONBLOCK, 0, fds),
		      fds);
}

/* A TCP connection: the server's end first. */
static void step_tcp(struct step *step)
{
	struct sockaddr_in addr = { .sin_family = AF_INET,
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(addr);
	int listener = socket(AF_INET, SOCK_STREAM, 0), fds[2];

	give_ports(listener);
	if (listener < 0 || bind(listener, (void *)&addr, len) ||
	    getsockname(listener, (void *)&addr, &len) || listen(listener, 1)) {
		print_result(-1);
		return;
	}
	fds[1] = socket(AF_INET, SOCK_STREAM, 0);
	give_ports(fds[1]);
	connect(fds[1], (void *)&addr, len);
	fds[0] = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
	fcntl(fds[1], F_SETFL, O_NONBLOCK);
	close(listener);
	store_fd_pair(step, 0, fds);
}

static void step_pipe(struct step *step)
{
	int fds[2];

	store_fd_pair(step, pipe2(fds, O_NONBLOCK), fds);
}

static void step_eventfd(struct step *step)
{
	store_new_fd(step, 0, eventfd((unsigned)ARG(1), EFD_NONBLOCK));
}

static void step_timerfd(struct step *step)
{
	store_new_fd(step, 0, timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
}

static void step_file(struct step *step)
{
	int fd = open("/proc/self/cmdline", O_RDONLY);

	store_new_fd(step, 0, fd);
}

static void step_memfd(struct step *step)
{
	int fd = memfd_create("differential", 0);

	store_new_fd(step, 0, fd);
	if (fd >= 0 && ftruncate(fd, 64))
		print_result(-1);
}

static void step_dup(struct step *step)
{
	store_new_fd(step, 1, dup(FD));
}

/* dup2 DESCRIPTOR NUMBER SLOT: the slot is for the new one */
static void step_dup2(struct step *step)
{
	store_new_fd(step, 2, dup2(FD, (int)ARG(1)));
	on_close();
}

static void step_dup3(struct step *step)
{
	store_new_fd(step, 2, dup3(FD, (int)ARG(1), (int)ARG(3)));
	on_close();
}

static void step_fcntl(struct step *step)
{
	long done = fcntl(FD, (int)ARG(1), ARG(2));

	print_result(done);
	if (ARG(1) == F_DUPFD || ARG(1) == F_DUPFD_CLOEXEC)
		store_fd(step, 3, done);
}

static void step_close(struct step *step)
{
	print_result(close(FD));
	on_close();
}

/* As libuv does it. */
static void step_rawclose(struct step *step)
{
	print_result(syscall(SYS_close, FD));
	on_close();
}

static void step_close_range(struct step *step)
{
	unsigned first = (unsigned)ARG(0);

	/* Not the standard descriptors. */
	print_result(close_range(first < 3 ? 3 : first, (unsigned)ARG(1),
				 (int)ARG(2)));
	on_close();
}

/* pass DESCRIPTOR PAIR PAIR SLOT: to this process, by a pair of sockets */
static void step_pass(struct step *step)
{
	char byte = 0;
	struct iovec part = { &byte, 1 };
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr head;
	} control = { .head = { .cmsg_len = CMSG_LEN(sizeof(int)),
				.cmsg_level = SOL_SOCKET,
				.cmsg_type = SCM_RIGHTS } };
	struct msghdr message = { .msg_iov = &part,
				  .msg_iovlen = 1,
				  .msg_control = &control,
				  .msg_controllen = sizeof(control) };
	int fd = FD;

	/*
	 * Datagrams queued for UDP sockets are counted when they are sent and
	 * received.
	 */
	if (is_udp((int)ARG(1)) || is_udp((int)ARG(2))) {
		print(" skipped");
		return;
	}
	memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	print_result(sendmsg((int)ARG(1), &message, MSG_DONTWAIT));
	message.msg_controllen = sizeof(control);
	control.head.cmsg_level = 0;
	print_result(recvmsg((int)ARG(2), &message, MSG_DONTWAIT));
	if (control.head.cmsg_level != SOL_SOCKET || !message.msg_controllen)
		return;
	memcpy(&fd, CMSG_DATA(&control.head), sizeof(fd));
	print(" %d", fd);
	store_fd(step, 3, fd);
}

/* The open numbers, as the C library reports them. */
static void step_open(struct step *step)
{
	(void)step;
	print(" =");
	for (int fd = 0; fd < 1024; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			print(" %d", fd);
}

bool run_descriptor(struct step *step)
{
	static const struct call calls[] = {
		STEP(pair),	STEP(tcp),	   STEP(pipe),	STEP(eventfd),
		STEP(timerfd),	STEP(file),	   STEP(memfd), STEP(dup),
		STEP(dup2),	STEP(dup3),	   STEP(fcntl), STEP(close),
		STEP(rawclose), STEP(close_range), STEP(pass),	STEP(open),
	};

	return run_call(calls, sizeof(calls) / sizeof(*calls), step);
}
