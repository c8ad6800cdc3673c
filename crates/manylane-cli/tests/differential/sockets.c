/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps about the address and the options of a socket. */
#include "differential.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sys/ioctl.h>
#include <sys/time.h>
#include <unistd.h>

static void step_socket(struct step *step)
{
	int fd = socket((int)ARG(1), (int)ARG(2) | SOCK_CLOEXEC, (int)ARG(3));

	store_new_fd(step, 0, fd);
	give_ports(fd);
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

bool run_socket(struct step *step)
{
	static const struct call calls[] = {
		STEP(socket),	   STEP(bind),	     STEP(probe),
		STEP(connect),	   STEP(disconnect), STEP(setsockopt),
		STEP(getsockopt),  STEP(timeout),    STEP(gettimeout),
		STEP(fionread),	   STEP(fionbio),    STEP(getsockname),
		STEP(getpeername), STEP(shutdown),
	};

	return run_call(calls, sizeof(calls) / sizeof(*calls), step);
}
