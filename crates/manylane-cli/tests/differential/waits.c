/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps that wait for several descriptors. */
#include "differential.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <unistd.h>

#define FDS_MAX 8

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
	int count = collect(step, fds), nfds = 0, done;
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
		nfds = fd >= nfds ? fd + 1 : nfds;
	}
	done = with_mask ? pselect(nfds, &sets[0], &sets[1], &sets[2], &exact,
				   NULL) :
			   select(nfds, &sets[0], &sets[1], &sets[2], &time);
	is_otherwise = done >= 0 && may_report_differently(step, fds, count);
	if (is_otherwise)
		print(" = some");
	else
		print_result(done);
	for (int set = 0; set < 3; set++)
		for (int fd = 0; fd < nfds; fd++)
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
	int maxevents = (int)ARG(1) % 17, done;

	if (ARG(3) == 0)
		done = epoll_wait(FD, events, maxevents, (int)ARG(2));
	else if (ARG(3) == 1)
		done = epoll_pwait(FD, events, maxevents, (int)ARG(2), NULL);
	else
		done = epoll_pwait2(FD, events, maxevents, &time, NULL);
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

bool run_wait(struct step *step)
{
	static const struct call calls[] = {
		STEP(poll),	  STEP(ppoll),	      STEP(select),
		STEP(pselect),	  STEP(epoll_create), STEP(epoll_ctl),
		STEP(epoll_wait),
	};

	return run_call(calls, sizeof(calls) / sizeof(*calls), step);
}
