/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server whose threads are in another network namespace than its socket, or
 * in the same one:
 *
 *	netns move|stay
 *
 * Both namespaces are created by this program. Datagrams to the same address in
 * the threads' namespace are not for the server.
 */
#define _GNU_SOURCE
#include "loopback.h"
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define FLOWS 16
#define WORKERS 2
#define WARM_UP_DATAGRAMS 50

static int server;
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], total, foreign;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (recv(server, &byte, 1, 0) == 1) {
		if (byte == 's')
			foreign++;
		received[nth]++;
		total++;
	}
	return NULL;
}

static void new_namespace(void)
{
	struct ifreq loopback = { .ifr_name = "lo", .ifr_flags = IFF_UP };
	int fd;

	if (unshare(CLONE_NEWNET)) {
		perror("unshare");
		exit(1);
	}
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (ioctl(fd, SIOCSIFFLAGS, &loopback))
		perror("lo");
	close(fd);
}

static void send_to_all(const int *clients, char byte)
{
	unsigned want = total + FLOWS;
	int i;

	for (i = 0; i < FLOWS; i++)
		if (sendto(clients[i], &byte, 1, 0, (void *)&address,
			   sizeof(address)) != 1)
			perror("sendto");
	while (total < want)
		usleep(50);
}

int main(int argc, char **argv)
{
	int clients[FLOWS], i, other;
	pthread_t thread;

	new_namespace();
	server = loopback_server(0, &address);
	for (i = 0; i < FLOWS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	if (argc > 1 && !strcmp(argv[1], "move"))
		new_namespace();
	for (i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker, (void *)(long)i);
	while (received[0] < WARM_UP_DATAGRAMS ||
	       received[1] < WARM_UP_DATAGRAMS)
		send_to_all(clients, 'x');
	for (i = 0; argc > 1 && !strcmp(argv[1], "move") && i < FLOWS; i++) {
		other = socket(AF_INET, SOCK_DGRAM, 0);
		sendto(other, "s", 1, 0, (void *)&address, sizeof(address));
		close(other);
	}
	/*
	 * By then, a thread that received a datagram of the other namespace has
	 * counted it.
	 */
	for (i = 0; i < WARM_UP_DATAGRAMS; i++)
		send_to_all(clients, 'x');
	printf("%u foreign\n", foreign);
	fflush(stdout);
	_exit(0);
}
