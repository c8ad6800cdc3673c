/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A UDP socket that is bound after a fork. The parent binds it, and receives in
 * two threads until the library has seen both return often. They are parked,
 * and the child receives one more. Prints the receive timeout that each process
 * sees, which is none, and what the child received.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>

static int control_pair[2];
static _Atomic unsigned hold;

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte;

	while (recv(server, &byte, 1, 0) == 1) {
		/*
		 * Before it is counted, because the next datagram is for the
		 * other thread.
		 */
		int parks = hold;

		count_received(nth);
		while (parks)
			pause();
	}
	perror("recv");
	exit(1);
}

static void serve_and_park(void)
{
	socklen_t len = sizeof(address);

	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(server, (void *)&address, len) ||
	    getsockname(server, (void *)&address, &len)) {
		perror("bind");
		exit(1);
	}
	start_and_warm_up();
	hold = 1;
	for (int i = 0; i < WORKERS; i++) {
		unsigned want = total + 1;

		send_one(i, 'x');
		while (total < want)
			usleep(50);
	}
}

static void print_timeout(const char *process)
{
	struct timeval time = { .tv_sec = -1 };
	socklen_t len = sizeof(time);

	getsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &time, &len);
	printf("%s: timeout %ld s %ld us\n", process, (long)time.tv_sec,
	       (long)time.tv_usec);
	fflush(stdout);
}

static void run_child(void)
{
	char byte;

	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (read(control_pair[1], &byte, 1) != 1)
		_exit(1);
	print_timeout("child");
	if (write(control_pair[1], &byte, 1) != 1)
		_exit(1);
	if (recv(server, &byte, 1, 0) == 1)
		printf("child: got %c\n", byte);
	else
		printf("child: %s\n", strerror(errno));
	fflush(stdout);
	_exit(0);
}

int main(void)
{
	char byte = 0;
	int status;

	open_clients();
	server = socket(AF_INET, SOCK_DGRAM, 0);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, control_pair))
		return 1;
	if (fork() == 0)
		run_child();
	close(control_pair[1]);
	serve_and_park();
	print_timeout("parent");
	/* The child receives from now on. */
	if (write(control_pair[0], &byte, 1) != 1 ||
	    read(control_pair[0], &byte, 1) != 1)
		return 1;
	send_one(0, 'c');
	wait(&status);
	return !WIFEXITED(status) || WEXITSTATUS(status);
}
