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
#include "warm_up.h"
#include <net/if.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static _Atomic unsigned foreign;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (recv(server, &byte, 1, 0) == 1) {
		if (byte == 's')
			foreign++;
		count_received(nth);
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

int main(int argc, char **argv)
{
	int i, other;

	new_namespace();
	server = loopback_server(0, &address);
	open_clients();
	if (argc > 1 && !strcmp(argv[1], "move"))
		new_namespace();
	start_and_warm_up();
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
		send_all_and_wait('x');
	printf("%u foreign\n", foreign);
	fflush(stdout);
	_exit(0);
}
