/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * One thread forks all the time, which prepares lanes. Another one makes
 * sockets plain at the same time. A plain socket is the kernel's: it shares its
 * port with no other socket, and receives all that is sent to it.
 *
 *	fork_fallback_race [copies] [unbound]
 *
 * unbound: it also forks between socket(2) and bind(2).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/*
 * Each of them waits for one or two forks, which take a few milliseconds with
 * the library: some ten seconds in all, so that rare orders of the threads
 * occur. A fork takes 30 ms with the memory that a sanitizer maps.
 */
#ifdef SANITIZED
#define SOCKETS 100
#else
#define SOCKETS 2000
#endif
#define SENDERS 4
/* Seconds; a busy machine handles fewer sockets in that time. */
#define SECONDS_MAX 40

static atomic_int stop;
/* Held from socket(2) to bind(2), and during a fork. */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static int unbound;
/* Forks since the last wait for one. */
static sem_t forks;

static void lock_opening(void)
{
	if (!unbound)
		pthread_mutex_lock(&opening);
}

static void unlock_opening(void)
{
	if (!unbound)
		pthread_mutex_unlock(&opening);
}

static void *fork_repeatedly(void *unused)
{
	while (!stop) {
		pid_t child;

		lock_opening();
		child = fork();
		if (child == 0)
			_exit(0);
		unlock_opening();
		waitpid(child, NULL, 0);
		sem_post(&forks);
	}
	return unused;
}

/*
 * Opens a socket with one receiver, and a copy of it with a lower number. The
 * number is free again at the moment at which lanes are made for the socket.
 */
static int with_lower_copy(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	int low = socket(AF_INET, SOCK_DGRAM, 0);
	int original = socket(AF_INET, SOCK_DGRAM, 0);

	close(low);
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	bind(original, (struct sockaddr *)&addr, sizeof(addr));
	close(dup(original));
	return original;
}

int main(int argc, char **argv)
{
	int copies = argc > 1 && !strcmp(argv[1], "copies");
	int senders[SENDERS], shared = 0, missing = 0;
	time_t end = time(NULL) + SECONDS_MAX;
	pthread_t thread;

	unbound = argc > 1 && !strcmp(argv[argc - 1], "unbound");
	for (int i = 0; i < SENDERS; i++)
		senders[i] = socket(AF_INET, SOCK_DGRAM, 0);
	sem_init(&forks, 0, 0);
	pthread_create(&thread, NULL, fork_repeatedly, NULL);
	for (int n = 0; n < SOCKETS && time(NULL) < end; n++) {
		struct sockaddr_in addr = { .sin_family = AF_INET };
		int original = -1, value = 1, fd;
		socklen_t len = sizeof(addr);
		char byte = 0;

		lock_opening();
		if (copies)
			original = with_lower_copy();
		fd = socket(AF_INET, SOCK_DGRAM, 0);
		addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		bind(fd, (struct sockaddr *)&addr, len);
		unlock_opening();
		getsockname(fd, (struct sockaddr *)&addr, &len);
		/* With IP_RECVERR, it has no lanes. */
		setsockopt(fd, IPPROTO_IP, IP_RECVERR, &value, sizeof(value));
		/* A fork that was about to make lanes is over by then. */
		while (!sem_trywait(&forks))
			;
		sem_wait(&forks);
		len = sizeof(value);
		if (getsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &value, &len) ||
		    value)
			shared++;
		for (int i = 0; i < SENDERS; i++)
			sendto(senders[i], &byte, 1, 0,
			       (struct sockaddr *)&addr, sizeof(addr));
		/* On a busy machine, softirqs queue them a moment later. */
		for (int i = 0; i < SENDERS; i++) {
			struct pollfd at = { .fd = fd, .events = POLLIN };

			missing += poll(&at, 1, 50000) != 1 ||
				   recv(fd, &byte, 1, MSG_DONTWAIT) != 1;
		}
		close(fd);
		if (copies)
			close(original);
	}
	stop = 1;
	pthread_join(thread, NULL);
	printf("%d shared, %d missing\n", shared, missing);
	return 0;
}
