/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server that comes late: late PORT ADDRESS FILE
 * Answers each datagram with the same and a "!", but for what begins with "n":
 * a number, which it notes. After "late" it does nothing until FILE is there;
 * to "tell" it says how many numbers it got, the first and the last, and how
 * many did not follow the one before. Ends at SIGTERM with 0.
 */
#include <arpa/inet.h>
#include <err.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void leave(int signal)
{
	(void)signal;
	_exit(0);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int fd = socket(AF_INET, SOCK_DGRAM, 0), first = -1, last = -1;
	unsigned count = 0, jumps = 0;

	if (argc < 4)
		errx(2, "late PORT ADDRESS FILE");
	signal(SIGTERM, leave);
	address.sin_port = htons(atoi(argv[1]));
	address.sin_addr.s_addr = inet_addr(argv[2]);
	if (fd < 0 || bind(fd, (void *)&address, sizeof(address)))
		err(1, "bind");
	for (;;) {
		char buffer[2048];
		struct sockaddr_in peer;
		socklen_t len = sizeof(peer);
		ssize_t got = recvfrom(fd, buffer, sizeof(buffer) - 100, 0,
				       (void *)&peer, &len);

		if (got < 0)
			err(1, "recvfrom");
		buffer[got] = 0;
		if (buffer[0] == 'n') {
			int number = atoi(buffer + 1);

			if (first < 0)
				first = number;
			else if (number != last + 1)
				jumps++;
			last = number;
			count++;
			continue;
		}
		if (!strcmp(buffer, "tell"))
			got = sprintf(buffer, "%u from %d to %d, %u jumps", count,
				      first, last, jumps);
		else
			buffer[got++] = '!';
		if (sendto(fd, buffer, got, 0, (void *)&peer, len) != got)
			err(1, "sendto");
		while (!strncmp(buffer, "late", 4) && access(argv[3], F_OK))
			usleep(1000);
	}
}
