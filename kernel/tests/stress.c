// SPDX-License-Identifier: GPL-2.0-only
/*
 * Threads that do what a program may do, at random, with the same sockets: a
 * descriptor may end, and another begin, under every call. Nothing is checked but
 * that the kernel has nothing to complain about (guest.sh), and that the module
 * is free at the end.
 */
#define _GNU_SOURCE
#include <linux/sockios.h>
#include <netinet/udp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#include "test.h"

#define SOCKETS 6
#define THREADS 12
#define HEADERS 32

static int sockets[SOCKETS];
static struct sockaddr_storage names[SOCKETS];
static double end;
static unsigned long calls;

static unsigned int dice(unsigned int *state, unsigned int sides)
{
	*state = *state * 1103515245 + 12345;
	return (*state >> 16) % sides;
}

static void replace(int i, unsigned int *state)
{
	struct sockaddr_storage name;
	int fd = bound(dice(state, 2) ? AF_INET : AF_INET6, &name);
	int size = dice(state, 2) ? 4096 : 1 << 20;

	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
	if (dice(state, 8))
		attach(fd, dice(state, 2), dice(state, 6));
	names[i] = name;
	close(__atomic_exchange_n(&sockets[i], fd, __ATOMIC_SEQ_CST));
}

static void remember(int fd, unsigned int *state)
{
	static char buffer[HEADERS][64], control[HEADERS][64];
	struct mmsghdr headers[HEADERS] = {};
	struct iovec iov[HEADERS][2];
	static struct manylane_result results[HEADERS];
	struct manylane_register args = { .version = MANYLANE_VERSION,
					  .count = dice(state, HEADERS + 1),
					  .headers = (uintptr_t)headers,
					  .results = (uintptr_t)results };
	int i;

	for (i = 0; i < HEADERS; i++) {
		iov[i][0] = (struct iovec){ buffer[i], 16 };
		iov[i][1] = (struct iovec){ buffer[i] + 16, 16 };
		headers[i].msg_hdr.msg_iov = iov[i];
		headers[i].msg_hdr.msg_iovlen = 1 + dice(state, 2);
		headers[i].msg_hdr.msg_control = control[i];
		headers[i].msg_hdr.msg_controllen = 64;
	}
	if (!dice(state, 10))
		headers[args.count / 2].msg_hdr.msg_iov = (void *)8;
	ioctl(fd, MANYLANE_REGISTER, &args);
}

static void options(int fd, unsigned int *state)
{
	static const int names_of[][2] = {
		{ SOL_SOCKET, SO_RXQ_OVFL },	{ SOL_SOCKET, SO_TIMESTAMP },
		{ SOL_IP, IP_PKTINFO },		{ SOL_IP, IP_RECVERR },
		{ SOL_IPV6, IPV6_RECVPKTINFO }, { SOL_UDP, 104 }
	};
	unsigned int which = dice(state, 7);
	int on = dice(state, 2), size = 2048 << dice(state, 10);

	if (which == 6)
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
	else
		setsockopt(fd, names_of[which][0], names_of[which][1], &on,
			   sizeof(on));
}

static void act(int i, unsigned int *state, int epoll)
{
	static const int flags[] = { 0,
				     0,
				     MSG_DONTWAIT,
				     MSG_DONTWAIT,
				     MSG_PEEK,
				     MSG_PEEK | MSG_DONTWAIT,
				     MSG_TRUNC,
				     MSG_ERRQUEUE };
	int fd = __atomic_load_n(&sockets[i], __ATOMIC_SEQ_CST), n, other;
	struct epoll_event event = { .events = EPOLLIN |
					       (dice(state, 2) ? EPOLLET : 0) },
			   out[4];
	struct manylane_receive receive = { .first = dice(state, HEADERS),
					    .count = 1 + dice(state, 8),
					    .flags = dice(state, 2) ?
							     MSG_DONTWAIT :
							     MSG_WAITFORONE };
	struct manylane_counts counts = { .version = MANYLANE_VERSION };
	struct pollfd p = { .fd = fd, .events = POLLIN | POLLOUT };
	struct sockaddr_storage name = names[i];
	char data[256], control[256];
	struct iovec iov = { data, dice(state, sizeof(data)) };
	struct msghdr msg = { .msg_name = &name,
			      .msg_namelen = sizeof(name),
			      .msg_iov = &iov,
			      .msg_iovlen = 1,
			      .msg_control = control,
			      .msg_controllen = sizeof(control) };

	switch (dice(state, 24)) {
	case 0:
		if (!dice(state, 8))
			replace(i, state);
		break;
	case 1:
	case 2:
	case 3:
		other = socket(name.ss_family, SOCK_DGRAM | SOCK_NONBLOCK, 0);
		for (n = dice(state, 40); n >= 0; n--)
			sendto(other, data, iov.iov_len, 0,
			       (struct sockaddr *)&name, sizeof(name));
		close(other);
		break;
	case 4:
		remember(fd, state);
		break;
	case 5:
	case 6:
	case 7:
		ioctl(fd, MANYLANE_RECEIVE, &receive);
		break;
	case 8:
		poll(&p, 1, dice(state, 3));
		break;
	case 9:
		epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
		break;
	case 10:
		epoll_wait(epoll, out, 4, dice(state, 3));
		break;
	case 11:
		ioctl(fd, SIOCINQ, &n);
		break;
	case 12:
		ioctl(fd, MANYLANE_COUNTS, &counts);
		break;
	case 13:
		options(fd, state);
		break;
	case 14:
		if (!dice(state, 50))
			shutdown(fd, dice(state, 3));
		break;
	case 15:
		if (!dice(state, 20))
			connect(fd,
				(struct sockaddr *)&names[dice(state, SOCKETS)],
				sizeof(name));
		break;
	case 16:
		attach(fd, dice(state, 2), 1 + dice(state, 3));
		break;
	case 17:
		/* To a port that nobody has, perhaps: ICMP errors. */
		sendto(fd, "x", 1, MSG_DONTWAIT,
		       (struct sockaddr *)&names[dice(state, SOCKETS)],
		       sizeof(name));
		break;
	default:
		recvmsg(fd, &msg, flags[dice(state, 8)]);
	}
}

static void *worker(void *seed)
{
	unsigned int state = (uintptr_t)seed;
	int epoll = epoll_create1(0);

	while (now() < end) {
		act(dice(&state, SOCKETS), &state, epoll);
		__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
	}
	close(epoll);
	return NULL;
}

static void on_signal(int unused)
{
	(void)unused;
}

void stress(unsigned int seconds, unsigned int seed)
{
	struct sigaction action = { .sa_handler = on_signal };
	pthread_t thread[THREADS];
	unsigned int i, state = seed;
	int guard[2], on = 1;
	double done;

	/*
	 * What the first user of hooks and timestamps turns on, and the last one off,
	 * changes the kernel's code: so often, emulated processors stumble over it.
	 */
	for (i = 0; i < 2; i++) {
		guard[i] = attached(i ? AF_INET6 : AF_INET, MANYLANE_FLOW, 1);
		setsockopt(guard[i], SOL_SOCKET, SO_TIMESTAMP, &on, sizeof(on));
	}
	sigaction(SIGUSR1, &action, NULL);
	for (i = 0; i < SOCKETS; i++) {
		sockets[i] = -1;
		replace(i, &state);
	}
	end = now() + seconds;
	for (i = 0; i < THREADS; i++)
		is(pthread_create(&thread[i], NULL, worker,
				  (void *)(uintptr_t)(seed + 1 + i)),
		   0);
	/* Signals, also to end the receives that still block at the end. */
	done = end + 5;
	while (now() < done) {
		usleep(now() < end ? 20000 : 2000);
		for (i = 0; i < THREADS; i++)
			pthread_kill(thread[i], SIGUSR1);
	}
	for (i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	for (i = 0; i < SOCKETS; i++)
		close(sockets[i]);
	for (i = 0; i < 2; i++)
		close(guard[i]);
	printf("%lu calls\n", calls);
}
