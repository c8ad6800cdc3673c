/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps: each makes one call and prints its result. */
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

#define LENGTH_MAX 70000
#define FDS_MAX 8

static _Thread_local char buffer[LENGTH_MAX];

#define ARG(n) (step->arg[n].value)
#define FD ((int)ARG(0))

/* Puts a new descriptor into a slot, whatever the slot contained. */
static void store_fd(struct step *step, int at, long fd)
{
	if (at < step->args && step->arg[at].slot >= 0 && fd >= 0)
		slots[step->arg[at].slot] = (int)fd;
}

static void store_new_fd(struct step *step, int at, long fd)
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

static void step_socket(struct step *step)
{
	int fd = socket((int)ARG(1), (int)ARG(2) | SOCK_CLOEXEC, (int)ARG(3));

	store_new_fd(step, 0, fd);
	give_ports(fd);
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

/* Stores the address at which a socket is reached: on loopback. */
static void store_address(int fd, int at)
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
	shared->address[at] = addr;
	queue_of(fd);
}

static socklen_t len_of(const struct sockaddr_storage *addr)
{
	return addr->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) :
					     sizeof(struct sockaddr_in);
}

/* bind SOCKET ADDRESS FAMILY IS_ANY: at a port that the kernel selects */
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
	print_result(done);
	if (!done)
		store_address(FD, (int)ARG(1));
}

/* probe ADDRESS OPTION VALUE: can another socket be bound to it, too? */
static void step_probe(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(0)];
	int fd = socket(addr->ss_family, SOCK_DGRAM, 0), saved;
	int value = (int)ARG(2);

	if (ARG(1))
		setsockopt(fd, SOL_SOCKET, (int)ARG(1), &value, sizeof(value));
	print_result(bind(fd, (void *)addr, len_of(addr)));
	saved = errno;
	close(fd);
	errno = saved;
}

static void step_connect(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];

	/* An address without a family would disconnect, and change the flow. */
	if (!addr->ss_family)
		print(" skipped");
	else
		print_result(connect(FD, (void *)addr, len_of(addr)));
}

static void step_disconnect(struct step *step)
{
	struct sockaddr addr = { .sa_family = AF_UNSPEC };

	print_result(connect(FD, &addr, sizeof(addr)));
}

/*
 * True if a datagram of that length may be sent to an address, or to the peer.
 */
static bool begin_send(struct step *step, int to, size_t *len)
{
	struct queue *queue =
		to ? queue_to(&shared->address[ARG(to)]) : queue_of_peer(FD);

	if (*len > LENGTH_MAX)
		*len = LENGTH_MAX;
	if (may_send(FD, queue, len)) {
		write_payload(FD, buffer, *len);
		return true;
	}
	print(" skipped");
	return false;
}

static void print_sent(long result)
{
	print_result(result);
	if (result >= 0)
		wait_for_delivery();
}

static void step_send(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (begin_send(step, 0, &len))
		print_sent(send(FD, buffer, len, (int)ARG(2)));
}

static void step_write(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (begin_send(step, 0, &len))
		print_sent(write(FD, buffer, len));
}

static void step_writev(struct step *step)
{
	size_t len = (size_t)ARG(1);

	if (!begin_send(step, 0, &len))
		return;
	struct iovec parts[2] = { { buffer, len / 2 },
				  { buffer + len / 2, len - len / 2 } };
	print_sent(writev(FD, parts, 2));
}

static void step_sendto(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];
	size_t len = (size_t)ARG(2);

	if (begin_send(step, 1, &len))
		print_sent(sendto(FD, buffer, len, (int)ARG(3), (void *)addr,
				  len_of(addr)));
}

static void step_sendmsg(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];
	size_t len = (size_t)ARG(2);

	if (!begin_send(step, 1, &len))
		return;
	struct iovec parts[2] = { { buffer, len / 2 },
				  { buffer + len / 2, len - len / 2 } };
	struct msghdr message = { .msg_name = addr,
				  .msg_namelen = len_of(addr),
				  .msg_iov = parts,
				  .msg_iovlen = 2 };
	print_sent(sendmsg(FD, &message, (int)ARG(3)));
}

/* sendmmsg SOCKET ADDRESS COUNT LENGTH FLAGS */
static void step_sendmmsg(struct step *step)
{
	struct sockaddr_storage *addr = &shared->address[ARG(1)];
	struct mmsghdr many[FDS_MAX] = { 0 };
	struct iovec parts[FDS_MAX];
	int count = (int)ARG(2) % (FDS_MAX + 1), done;

	for (int at = 0; at < count; at++) {
		size_t len = (size_t)ARG(3) % (LENGTH_MAX / FDS_MAX);
		char *from = buffer + at * (LENGTH_MAX / FDS_MAX);

		if (!may_send(FD, queue_to(addr), &len)) {
			print(" skipped");
			return;
		}
		write_payload(FD, from, len);
		parts[at] = (struct iovec){ from, len };
		many[at].msg_hdr.msg_iov = &parts[at];
		many[at].msg_hdr.msg_iovlen = 1;
		many[at].msg_hdr.msg_name = addr;
		many[at].msg_hdr.msg_namelen = len_of(addr);
	}
	done = sendmmsg(FD, many, (unsigned)count, (int)ARG(4));
	print_sent(done);
	for (int at = 0; at < done; at++)
		print(" %u", many[at].msg_len);
}

static int process_of(int actor)
{
	return actor < THREADS ? 0 : actor;
}

/* Changes by others in an instance from before the fork are not known. */
static bool is_changed_by_others(const struct step *step)
{
	return shared->changed_by & ~(1 << process_of(step->actor));
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

static int collect(struct step *step, struct pollfd fds[FDS_MAX])
{
	int count = 0;

	for (int at = 1; at + 1 < step->args && count < FDS_MAX; at += 2) {
		fds[count++] = (struct pollfd){ .fd = (int)ARG(at),
						.events = (short)ARG(at + 1) };
		/* Its watches may change because of that. */
		if (shared->has_forked && is_instance((int)ARG(at)))
			shared->changed_by |= 1 << process_of(step->actor);
	}
	return count;
}

/*
 * An instance reports an edge again when a socket in it becomes plain, and when
 * another process has added a lane.
 */
static bool may_report_differently(const struct step *step,
				   const struct pollfd *fds, int count)
{
	bool has_instance = false;

	for (int at = 0; at < count; at++)
		has_instance |= is_instance(fds[at].fd);
	return has_instance &&
	       (shared->has_edges || is_changed_by_others(step));
}

static void print_polled(const struct step *step, const struct pollfd *fds,
			 int count, int done)
{
	bool is_otherwise =
		done >= 0 && may_report_differently(step, fds, count);

	if (is_otherwise)
		print(" = some");
	else
		print_result(done);
	for (int at = 0; at < count; at++) {
		unsigned short events = (unsigned short)fds[at].revents;

		if (is_otherwise && is_instance(fds[at].fd))
			events &= (unsigned short)~(POLLIN | POLLRDNORM);
		print(" %x", events);
	}
}

/* poll MILLISECONDS DESCRIPTOR EVENTS... */
static void step_poll(struct step *step)
{
	struct pollfd fds[FDS_MAX];
	int count = collect(step, fds);

	print_polled(step, fds, count, poll(fds, (nfds_t)count, (int)ARG(0)));
}

static void step_ppoll(struct step *step)
{
	struct timespec time = { .tv_nsec = ARG(0) * 1000000 };
	struct pollfd fds[FDS_MAX];
	int count = collect(step, fds);

	print_polled(step, fds, count, ppoll(fds, (nfds_t)count, &time, NULL));
}

/* select MILLISECONDS DESCRIPTOR EVENTS..., as for poll */
static void by_select(struct step *step, bool with_mask)
{
	struct pollfd fds[FDS_MAX];
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
	is_otherwise = done >= 0 && may_report_differently(step, fds, count);
	if (is_otherwise)
		print(" = some");
	else
		print_result(done);
	for (int set = 0; set < 3; set++)
		for (int fd = 0; fd < most; fd++)
			if (FD_ISSET(fd, &sets[set]) &&
			    !(is_otherwise && !set && is_instance(fd)))
				print(" %c%d", "rwx"[set], fd);
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
	store_new_fd(step, 0, epoll_create1(0));
}

/* epoll_ctl INSTANCE CHANGE DESCRIPTOR EVENTS: with the slot as data */
static void step_epoll_ctl(struct step *step)
{
	struct epoll_event event = { .events = (uint32_t)ARG(3),
				     .data.u64 = (uint64_t)step->arg[2].slot |
						 (uint64_t)ARG(3) << 32 };
	long done = epoll_ctl(FD, (int)ARG(1), (int)ARG(2), &event);

	if (is_changed_by_others(step))
		print(" = some");
	else
		print_result(done);
	shared->has_watched |= !done && queue_of((int)ARG(2));
	shared->has_edges |= (ARG(3) & EPOLLET) != 0;
	if (shared->has_forked)
		shared->changed_by |= 1 << process_of(step->actor);
}

static int by_data(const void *one, const void *other)
{
	uint64_t a = ((const struct epoll_event *)one)->data.u64;
	uint64_t b = ((const struct epoll_event *)other)->data.u64;

	return a < b ? -1 : a > b;
}

/* epoll_wait INSTANCE MAX MILLISECONDS CALL */
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
	    (shared->has_left_watched || is_changed_by_others(step))) {
		print(" = some");
		return;
	}
	print_result(done);
	if (done > 1)
		qsort(events, (size_t)done, sizeof(*events), by_data);
	for (int at = 0; at < done; at++)
		print(" %ss%d:%x",
		      events[at].data.u64 >> 32 & EPOLLET ? "edge-" : "",
		      (int)(uint32_t)events[at].data.u64, events[at].events);
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

/* setsockopt SOCKET LEVEL NAME VALUE LENGTH */
static void step_setsockopt(struct step *step)
{
	int value = (int)ARG(3);

	print_result(setsockopt(FD, (int)ARG(1), (int)ARG(2), &value,
				(socklen_t)ARG(4)));
}

static void step_getsockopt(struct step *step)
{
	long value[4] = { 0 };
	socklen_t len = (socklen_t)ARG(3);
	int done = getsockopt(FD, (int)ARG(1), (int)ARG(2), value, &len);

	print_result(done);
	if (!done)
		print(" %lx of %u", value[0], len);
}

/* timeout SOCKET MICROSECONDS */
static void step_timeout(struct step *step)
{
	struct timeval time = { ARG(1) / 1000000, ARG(1) % 1000000 };
	int done = setsockopt(FD, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));

	print_result(done);
	if (!done)
		set_timeout(FD, ARG(1) != 0);
}

static void step_gettimeout(struct step *step)
{
	struct timeval time = { 0 };
	socklen_t len = sizeof(time);
	int done = getsockopt(FD, SOL_SOCKET, SO_RCVTIMEO, &time, &len);

	print_result(done);
	print(" %ld.%06ld", time.tv_sec, time.tv_usec);
}

static void step_fionread(struct step *step)
{
	struct queue *queue = queue_of(FD);
	int value = -1;

	print_result(ioctl(FD, FIONREAD, &value));
	if (is_ordered(queue))
		print(" %d", value);
}

static void step_fionbio(struct step *step)
{
	int value = (int)ARG(1);

	print_result(ioctl(FD, FIONBIO, &value));
}

static void step_getsockname(struct step *step)
{
	struct sockaddr_storage addr = { 0 };
	socklen_t len = sizeof(addr);
	int done = getsockname(FD, (void *)&addr, &len);

	print_result(done);
	if (!done)
		print_address(&addr, len);
}

static void step_getpeername(struct step *step)
{
	struct sockaddr_storage addr = { 0 };
	socklen_t len = sizeof(addr);
	int done = getpeername(FD, (void *)&addr, &len);

	print_result(done);
	if (!done)
		print_address(&addr, len);
}

static void step_shutdown(struct step *step)
{
	print_result(shutdown(FD, (int)ARG(1)));
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
	shared->has_begun_wait[step->actor] = true;
	if (strncmp(step->name, "send", 4) && strncmp(step->name, "write", 5))
		on_possible_fallback();
	for (size_t at = 0; at < sizeof(steps) / sizeof(*steps); at++) {
		if (!strcmp(step->name, steps[at].name)) {
			steps[at].run(step);
			return;
		}
	}
	print(" what is %s?", step->name);
}
