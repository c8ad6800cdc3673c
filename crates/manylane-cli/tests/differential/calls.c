/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps: one call each, and what it said. */
#include "differential.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#define LONGEST 70000
#define MANY 8

static _Thread_local char buffer[LONGEST];

#define ARG(n) (step->arg[n].value)
#define FD ((int)ARG(0))

/* A new descriptor has a slot, whatever the slot meant. */
static void keep(struct step *step, int at, long fd)
{
	if (at < step->args && step->arg[at].slot >= 0 && fd >= 0)
		slots[step->arg[at].slot] = (int)fd;
}

static void keep_new(struct step *step, int at, long fd)
{
	say_result(fd);
	keep(step, at, fd);
}

/* Two new ones. */
static void keep_both(struct step *step, int done, const int fds[2])
{
	say_result(done);
	if (done < 0)
		return;
	say(" %d %d", fds[0], fds[1]);
	keep(step, 0, fds[0]);
	keep(step, 1, fds[1]);
}

static void step_socket(struct step *step)
{
	keep_new(step, 0,
		 socket((int)ARG(1), (int)ARG(2) | SOCK_CLOEXEC, (int)ARG(3)));
}

static void step_pair(struct step *step)
{
	int fds[2];

	keep_both(step,
		  socketpair(AF_UNIX, (int)ARG(2) | SOCK_NONBLOCK, 0, fds),
		  fds);
}

/* A connection: the server's end first. */
static void step_tcp(struct step *step)
{
	struct sockaddr_in addr = { .sin_family = AF_INET,
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(addr);
	int listener = socket(AF_INET, SOCK_STREAM, 0), fds[2];

	if (listener < 0 || bind(listener, (void *)&addr, len) ||
	    getsockname(listener, (void *)&addr, &len) || listen(listener, 1)) {
		say_result(-1);
		return;
	}
	fds[1] = socket(AF_INET, SOCK_STREAM, 0);
	connect(fds[1], (void *)&addr, len);
	fds[0] = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
	fcntl(fds[1], F_SETFL, O_NONBLOCK);
	close(listener);
	keep_both(step, 0, fds);
}

static void step_pipe(struct step *step)
{
	int fds[2];

	keep_both(step, pipe2(fds, O_NONBLOCK), fds);
}

static void step_eventfd(struct step *step)
{
	keep_new(step, 0, eventfd((unsigned)ARG(1), EFD_NONBLOCK));
}

static void step_timerfd(struct step *step)
{
	keep_new(step, 0, timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
}

static void step_file(struct step *step)
{
	int fd = open("/proc/self/cmdline", O_RDONLY);

	keep_new(step, 0, fd);
}

static void step_memfd(struct step *step)
{
	int fd = memfd_create("differential", 0);

	keep_new(step, 0, fd);
	if (fd >= 0 && ftruncate(fd, 64))
		say_result(-1);
}

/* Remembers where it is reached: where from any address, on loopback. */
static void remember(int fd, int at)
{
	struct sockaddr_storage addr = { 0 };
	struct sockaddr_in *in = (void *)&addr;
	struct sockaddr_in6 *in6 = (void *)&addr;
	socklen_t len = sizeof(addr);

	if (getsockname(fd, (void *)&addr, &len))
		return;
	if (addr.ss_family == AF_INET && !in->sin_addr.s_addr)
		in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (addr.ss_family == AF_INET6 &&
	    IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr))
		in6->sin6_addr = in6addr_loopback;
	all->address[at] = addr;
	queue_of(fd);
}

static socklen_t len_of(const struct sockaddr_storage *addr)
{
	return addr->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) :
					     sizeof(struct sockaddr_in);
}

/* bind SOCKET ADDRESS FAMILY IS_ANY: at a port that the kernel picks */
static void step_bind(struct step *step)
{
	struct sockaddr_storage addr = { .ss_family = (sa_family_t)ARG(2) };
	int done;

	if (!ARG(3) && ARG(2) == AF_INET)
		((struct sockaddr_in *)&addr)->sin_addr.s_addr =
			htonl(INADDR_LOOPBACK);
	if (!ARG(3) && ARG(2) == AF_INET6)
		((struct sockaddr_in6 *)&addr)->sin6_addr = in6addr_loopback;
	done = bind(FD, (void *)&addr, len_of(&addr));
	say_result(done);
	if (!done)
		remember(FD, (int)ARG(1));
}

/* probe ADDRESS OPTION VALUE: whether another socket may have it, too */
static void step_probe(struct step *step)
{
	struct sockaddr_storage *addr = &all->address[ARG(0)];
	int fd = socket(addr->ss_family, SOCK_DGRAM, 0), saved;
	int value = (int)ARG(2);

	if (ARG(1))
		setsockopt(fd, SOL_SOCKET, (int)ARG(1), &value, sizeof(value));
	say_result(bind(fd, (void *)addr, len_of(addr)));
	saved = errno;
	close(fd);
	errno = saved;
}

static void step_connect(struct step *step)
{
	struct sockaddr_storage *addr = &all->address[ARG(1)];

	/* Of no family it would be a disconnect, and what follows another flow. */
	if (!addr->ss_family)
		say(" skipped");
	else
		say_result(connect(FD, (void *)addr, len_of(addr)));
}

static void step_disconnect(struct step *step)
{
	struct sockaddr addr = { .sa_family = AF_UNSPEC };

	say_result(connect(FD, &addr, sizeof(addr)));
}

/* True if a datagram of that length may go to an address, or to the peer. */
static bool begin(struct step *step, int to, size_t *len)
{
	struct queue *queue =
		to ? queue_to(&all->address[ARG(to)]) : queue_of_peer(FD);

	if (*len > LONGEST)
		*len = LONGEST;
	if (may_send(FD, queue, len)) {
		fill(FD, buffer, *len);
		return true;
	}
	say(" skipped");
	return false;
}

static void say_sent(long result)
{
	say_result(result);
	if (result >= 0)
		delivered();
}

static void step_send(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (begin(step, 0, &len))
		say_sent(send(FD, buffer, len, (int)ARG(2)));
}

static void step_write(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (begin(step, 0, &len))
		say_sent(write(FD, buffer, len));
}

static void step_writev(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (!begin(step, 0, &len))
		return;
	struct iovec parts[2] = { { buffer, len / 2 },
				  { buffer + len / 2, len - len / 2 } };
	say_sent(writev(FD, parts, 2));
}

static void step_sendto(struct step *step)
{
	struct sockaddr_storage *addr = &all->address[ARG(1)];
	size_t len = (size_t)ARG(2);

	if (begin(step, 1, &len))
		say_sent(sendto(FD, buffer, len, (int)ARG(3), (void *)addr,
				len_of(addr)));
}

static void step_sendmsg(struct step *step)
{
	struct sockaddr_storage *addr = &all->address[ARG(1)];
	size_t len = (size_t)ARG(2);

	if (!begin(step, 1, &len))
		return;
	struct iovec parts[2] = { { buffer, len / 2 },
				  { buffer + len / 2, len - len / 2 } };
	struct msghdr message = { .msg_name = addr,
				  .msg_namelen = len_of(addr),
				  .msg_iov = parts,
				  .msg_iovlen = 2 };
	say_sent(sendmsg(FD, &message, (int)ARG(3)));
}

/* sendmmsg SOCKET ADDRESS COUNT LENGTH FLAGS */
static void step_sendmmsg(struct step *step)
{
	struct sockaddr_storage *addr = &all->address[ARG(1)];
	struct mmsghdr many[MANY] = { 0 };
	struct iovec parts[MANY];
	int count = (int)ARG(2) % (MANY + 1), done;

	for (int at = 0; at < count; at++) {
		size_t len = (size_t)ARG(3) % (LONGEST / MANY);
		char *from = buffer + at * (LONGEST / MANY);

		if (!may_send(FD, queue_to(addr), &len)) {
			say(" skipped");
			return;
		}
		fill(FD, from, len);
		parts[at] = (struct iovec){ from, len };
		many[at].msg_hdr.msg_iov = &parts[at];
		many[at].msg_hdr.msg_iovlen = 1;
		many[at].msg_hdr.msg_name = addr;
		many[at].msg_hdr.msg_namelen = len_of(addr);
	}
	done = sendmmsg(FD, many, (unsigned)count, (int)ARG(4));
	say_sent(done);
	for (int at = 0; at < done; at++)
		say(" %u", many[at].msg_len);
}

static int process_of(int actor)
{
	return actor < THREADS ? 0 : actor;
}

/* What they change in an instance from before the fork is not known. */
static bool is_changed_by_others(const struct step *step)
{
	return all->changed_by & ~(1 << process_of(step->actor));
}

static bool is_instance(int fd)
{
	char path[32], name[32] = "";
	int saved = errno;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	(void)!readlink(path, name, sizeof(name) - 1);
	errno = saved;
	return !strcmp(name, "anon_inode:[eventpoll]");
}

static int collect(struct step *step, struct pollfd fds[MANY])
{
	int count = 0;

	for (int at = 1; at + 1 < step->args && count < MANY; at += 2) {
		fds[count++] = (struct pollfd){ .fd = (int)ARG(at),
						.events = (short)ARG(at + 1) };
		/* Its watches may change by that. */
		if (all->has_forked && is_instance((int)ARG(at)))
			all->changed_by |= 1 << process_of(step->actor);
	}
	return count;
}

/*
 * An instance tells of an edge again when a socket in it becomes plain, and of
 * one lane of a socket that another process added.
 */
static bool is_told_otherwise(const struct step *step, const struct pollfd *fds,
			      int count)
{
	bool has_instance = false;

	for (int at = 0; at < count; at++)
		has_instance |= is_instance(fds[at].fd);
	return has_instance && (all->has_edges || is_changed_by_others(step));
}

static void say_polled(const struct step *step, const struct pollfd *fds,
		       int count, int done)
{
	bool is_otherwise = done >= 0 && is_told_otherwise(step, fds, count);

	if (is_otherwise)
		say(" = some");
	else
		say_result(done);
	for (int at = 0; at < count; at++) {
		unsigned short events = (unsigned short)fds[at].revents;

		if (is_otherwise && is_instance(fds[at].fd))
			events &= (unsigned short)~(POLLIN | POLLRDNORM);
		say(" %x", events);
	}
}

/* poll MILLISECONDS DESCRIPTOR EVENTS... */
static void step_poll(struct step *step)
{
	struct pollfd fds[MANY];
	int count = collect(step, fds);

	say_polled(step, fds, count, poll(fds, (nfds_t)count, (int)ARG(0)));
}

static void step_ppoll(struct step *step)
{
	struct timespec time = { .tv_nsec = ARG(0) * 1000000 };
	struct pollfd fds[MANY];
	int count = collect(step, fds);

	say_polled(step, fds, count, ppoll(fds, (nfds_t)count, &time, NULL));
}

/* select MILLISECONDS DESCRIPTOR EVENTS..., as for poll */
static void by_select(struct step *step, bool with_mask)
{
	struct pollfd fds[MANY];
	int count = collect(step, fds), most = 0, done;
	struct timeval time = { .tv_usec = ARG(0) * 1000 };
	struct timespec exact = { .tv_nsec = ARG(0) * 1000000 };
	bool is_otherwise;
	fd_set sets[3];

	for (int set = 0; set < 3; set++)
		FD_ZERO(&sets[set]);
	for (int at = 0; at < count; at++) {
		int fd = fds[at].fd;

		if (fd < 0 || fd >= FD_SETSIZE)
			continue;
		if (fds[at].events & POLLIN)
			FD_SET(fd, &sets[0]);
		if (fds[at].events & POLLOUT)
			FD_SET(fd, &sets[1]);
		if (fds[at].events & POLLPRI)
			FD_SET(fd, &sets[2]);
		most = fd >= most ? fd + 1 : most;
	}
	done = with_mask ? pselect(most, &sets[0], &sets[1], &sets[2], &exact,
				   NULL) :
			   select(most, &sets[0], &sets[1], &sets[2], &time);
	is_otherwise = done >= 0 && is_told_otherwise(step, fds, count);
	if (is_otherwise)
		say(" = some");
	else
		say_result(done);
	for (int set = 0; set < 3; set++)
		for (int fd = 0; fd < most; fd++)
			if (FD_ISSET(fd, &sets[set]) &&
			    !(is_otherwise && !set && is_instance(fd)))
				say(" %c%d", "rwx"[set], fd);
}

static void step_select(struct step *step)
{
	by_select(step, false);
}

static void step_pselect(struct step *step)
{
	by_select(step, true);
}

static void step_epoll_create(struct step *step)
{
	keep_new(step, 0, epoll_create1(0));
}

/* epoll_ctl INSTANCE CHANGE DESCRIPTOR EVENTS: with the slot as data */
static void step_epoll_ctl(struct step *step)
{
	struct epoll_event event = { .events = (uint32_t)ARG(3),
				     .data.u64 = (uint64_t)step->arg[2].slot |
						 (uint64_t)ARG(3) << 32 };
	long done = epoll_ctl(FD, (int)ARG(1), (int)ARG(2), &event);

	if (is_changed_by_others(step))
		say(" = some");
	else
		say_result(done);
	all->has_watched |= !done && queue_of((int)ARG(2));
	all->has_edges |= (ARG(3) & EPOLLET) != 0;
	if (all->has_forked)
		all->changed_by |= 1 << process_of(step->actor);
}

static int by_data(const void *one, const void *other)
{
	uint64_t a = ((const struct epoll_event *)one)->data.u64;
	uint64_t b = ((const struct epoll_event *)other)->data.u64;

	return a < b ? -1 : a > b;
}

/* epoll_wait INSTANCE MOST MILLISECONDS CALL */
static void step_epoll_wait(struct step *step)
{
	struct epoll_event events[16] = { 0 };
	struct timespec time = { .tv_nsec = ARG(2) * 1000000 };
	int most = (int)ARG(1) % 17, done;

	if (ARG(3) == 0)
		done = epoll_wait(FD, events, most, (int)ARG(2));
	else if (ARG(3) == 1)
		done = epoll_pwait(FD, events, most, (int)ARG(2), NULL);
	else
		done = epoll_pwait2(FD, events, most, &time, NULL);
	if (done >= 0 &&
	    (all->has_left_watched || is_changed_by_others(step))) {
		say(" = some");
		return;
	}
	say_result(done);
	if (done > 1)
		qsort(events, (size_t)done, sizeof(*events), by_data);
	for (int at = 0; at < done; at++)
		say(" %ss%d:%x",
		    events[at].data.u64 >> 32 & EPOLLET ? "edge-" : "",
		    (int)(uint32_t)events[at].data.u64, events[at].events);
}

static void step_dup(struct step *step)
{
	keep_new(step, 1, dup(FD));
}

/* dup2 DESCRIPTOR NUMBER SLOT: the slot is for the new one */
static void step_dup2(struct step *step)
{
	keep_new(step, 2, dup2(FD, (int)ARG(1)));
	closed();
}

static void step_dup3(struct step *step)
{
	keep_new(step, 2, dup3(FD, (int)ARG(1), (int)ARG(3)));
	closed();
}

static void step_fcntl(struct step *step)
{
	long done = fcntl(FD, (int)ARG(1), ARG(2));

	say_result(done);
	if (ARG(1) == F_DUPFD || ARG(1) == F_DUPFD_CLOEXEC)
		keep(step, 3, done);
}

static void step_close(struct step *step)
{
	say_result(close(FD));
	closed();
}

/* As libuv does it. */
static void step_rawclose(struct step *step)
{
	say_result(syscall(SYS_close, FD));
	closed();
}

static void step_close_range(struct step *step)
{
	unsigned first = (unsigned)ARG(0);

	/* Never the standard ones. */
	say_result(close_range(first < 3 ? 3 : first, (unsigned)ARG(1),
			       (int)ARG(2)));
	closed();
}

/* setsockopt SOCKET LEVEL NAME VALUE LENGTH */
static void step_setsockopt(struct step *step)
{
	int value = (int)ARG(3);

	say_result(setsockopt(FD, (int)ARG(1), (int)ARG(2), &value,
			      (socklen_t)ARG(4)));
}

static void step_getsockopt(struct step *step)
{
	long value[4] = { 0 };
	socklen_t len = (socklen_t)ARG(3);
	int done = getsockopt(FD, (int)ARG(1), (int)ARG(2), value, &len);

	say_result(done);
	if (!done)
		say(" %lx of %u", value[0], len);
}

/* timeout SOCKET MICROSECONDS */
static void step_timeout(struct step *step)
{
	struct timeval time = { ARG(1) / 1000000, ARG(1) % 1000000 };
	int done = setsockopt(FD, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));

	say_result(done);
	if (!done)
		set_timeout(FD, ARG(1) != 0);
}

static void step_gettimeout(struct step *step)
{
	struct timeval time = { 0 };
	socklen_t len = sizeof(time);
	int done = getsockopt(FD, SOL_SOCKET, SO_RCVTIMEO, &time, &len);

	say_result(done);
	say(" %ld.%06ld", time.tv_sec, time.tv_usec);
}

static void step_fionread(struct step *step)
{
	struct queue *queue = queue_of(FD);
	int value = -1;

	say_result(ioctl(FD, FIONREAD, &value));
	if (is_ordered(queue))
		say(" %d", value);
}

static void step_fionbio(struct step *step)
{
	int value = (int)ARG(1);

	say_result(ioctl(FD, FIONBIO, &value));
}

static void step_getsockname(struct step *step)
{
	struct sockaddr_storage addr = { 0 };
	socklen_t len = sizeof(addr);
	int done = getsockname(FD, (void *)&addr, &len);

	say_result(done);
	if (!done)
		say_address(&addr, len);
}

static void step_getpeername(struct step *step)
{
	struct sockaddr_storage addr = { 0 };
	socklen_t len = sizeof(addr);
	int done = getpeername(FD, (void *)&addr, &len);

	say_result(done);
	if (!done)
		say_address(&addr, len);
}

static void step_shutdown(struct step *step)
{
	say_result(shutdown(FD, (int)ARG(1)));
}

/* pass DESCRIPTOR PAIR PAIR SLOT: to oneself, by a pair of sockets */
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

	/* What is queued for UDP sockets is counted where it is sent and received. */
	if (is_udp((int)ARG(1)) || is_udp((int)ARG(2))) {
		say(" skipped");
		return;
	}
	memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	say_result(sendmsg((int)ARG(1), &message, MSG_DONTWAIT));
	message.msg_controllen = sizeof(control);
	control.head.cmsg_level = 0;
	say_result(recvmsg((int)ARG(2), &message, MSG_DONTWAIT));
	if (control.head.cmsg_level != SOL_SOCKET || !message.msg_controllen)
		return;
	memcpy(&fd, CMSG_DATA(&control.head), sizeof(fd));
	say(" %d", fd);
	keep(step, 3, fd);
}

/* The numbers that are open, by what the C library says. */
static void step_open(struct step *step)
{
	(void)step;
	say(" =");
	for (int fd = 0; fd < 1024; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			say(" %d", fd);
}

void run(struct step *step)
{
	static const struct {
		const char *name;
		void (*run)(struct step *step);
	} steps[] = {
#define STEP(name) { #name, step_##name }
		STEP(socket),	   STEP(pair),	       STEP(tcp),
		STEP(pipe),	   STEP(eventfd),      STEP(timerfd),
		STEP(file),	   STEP(memfd),	       STEP(bind),
		STEP(probe),	   STEP(connect),      STEP(disconnect),
		STEP(send),	   STEP(write),	       STEP(writev),
		STEP(sendto),	   STEP(sendmsg),      STEP(sendmmsg),
		STEP(poll),	   STEP(ppoll),	       STEP(select),
		STEP(pselect),	   STEP(epoll_create), STEP(epoll_ctl),
		STEP(epoll_wait),  STEP(dup),	       STEP(dup2),
		STEP(dup3),	   STEP(fcntl),	       STEP(close),
		STEP(rawclose),	   STEP(close_range),  STEP(setsockopt),
		STEP(getsockopt),  STEP(timeout),      STEP(gettimeout),
		STEP(fionread),	   STEP(fionbio),      STEP(getsockname),
		STEP(getpeername), STEP(shutdown),     STEP(open),
		STEP(pass),
	};

	if (run_receive(step))
		return;
	all->began[step->actor] = true;
	if (strncmp(step->name, "send", 4) && strncmp(step->name, "write", 5))
		may_fall_back();
	for (size_t at = 0; at < sizeof(steps) / sizeof(*steps); at++) {
		if (!strcmp(step->name, steps[at].name)) {
			steps[at].run(step);
			return;
		}
	}
	say(" what is %s?", step->name);
}
