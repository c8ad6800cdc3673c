/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Invalid requests and commands, and sockets that no lease is for. */
#include "hostile.h"

/* Messages that are no requests, and a client that sends nothing. */
void test_invalid_messages(void)
{
	uint32_t words[4], wrong[4];
	struct mll_message message;
	int i, end, pipes[2], both[2], bound = open_udp(ip, 0);
	char bytes[64] = { 1 };

	secret(words);
	memcpy(wrong, words, sizeof(wrong));
	wrong[3] ^= 1;
	for (i = 0; i < 200; i++)
		connect_launcher();
	if (pipe(pipes))
		err(1, "pipe");
#define TRY(what, send)                                                   \
	do {                                                              \
		end = connect_launcher();                                 \
		send;                                                     \
		print_message(what, receive_message(end, &message, NULL), \
			      &message);                                  \
	} while (0)
#define ASK_FOR(what, fd)                                                  \
	do {                                                               \
		both[0] = fd;                                              \
		TRY(what, send_message(end, MLL_REQUEST, words, both, 1)); \
	} while (0)
	TRY("a byte", send(end, bytes, 1, 0));
	TRY("too much", send(end, bytes, 64, 0));
	TRY("a wrong secret", send_message(end, MLL_REQUEST, wrong, &bound, 1));
	TRY("no socket", send_message(end, MLL_REQUEST, words, NULL, 0));
	both[0] = both[1] = bound;
	TRY("two sockets", send_message(end, MLL_REQUEST, words, both, 2));
	TRY("an order", send_message(end, MLL_OPEN, NULL, NULL, 0));
	ASK_FOR("a pipe", pipes[0]);
	ASK_FOR("TCP", socket(AF_INET, SOCK_STREAM, 0));
	ASK_FOR("not bound", socket(AF_INET, SOCK_DGRAM, 0));
}

/* Invalid commands, and answers that are not read. */
void test_invalid_commands(void)
{
	struct lease lease;
	struct mll_message message;
	int i;

	request_lease(&lease, "twice open", open_udp(ip, 0));
	send_command(&lease, "open", MLL_OPEN);
	send_command(&lease, "open", MLL_OPEN);
	port++;
	request_lease(&lease, "never open", open_udp(ip, 0));
	send_command(&lease, "close", MLL_CLOSE);
	port++;
	request_lease(&lease, "as it should be", open_udp(ip, 0));
	send_command(&lease, "open", MLL_OPEN);
	send_command(&lease, "close", MLL_CLOSE);
	send_command(&lease, "close", MLL_CLOSE);
	port++;
	request_lease(&lease, "deaf", open_udp(ip, 0));
	for (i = 0;
	     i < 1000 && send_message(lease.end, MLL_OPEN, NULL, NULL, 0) > 0;
	     i++)
		;
	while (receive_message(lease.end, &message, NULL))
		;
	printf("ended\n");
}

/* Opens a lease of a socket of its own, and returns the socket. */
static int open_lease(struct lease *lease)
{
	int fd = open_udp(ip, 0);

	request_lease(lease, "before", fd);
	send_command(lease, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, lease, marker)));
	return fd;
}

/* A port belongs to its socket, not to the lease. */
void test_closed_socket(void)
{
	struct lease lease;
	struct mll_message message;
	int fd = open_lease(&lease);

	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the lease", receive_message(lease.end, &message, NULL),
		      &message);
}

/* A port after the launcher's child was stopped, and its socket closed. */
void test_stopped_child(void)
{
	struct lease lease;
	struct mll_message message;
	int fd = open_lease(&lease);

	fflush(stdout);
	kill(server, SIGTSTP);
	usleep(300000);
	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the lease", receive_message(lease.end, &message, NULL),
		      &message);
}

static void as_user(void *at)
{
	if (setresuid(65534, 65534, 65534))
		err(1, "setresuid");
	*(int *)at = open_udp("0.0.0.0", 1);
	pause();
}

/* Sockets that get only a part of their port's datagrams, or will. */
void test_partial_sockets(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9) };
	struct lease lease;
	struct mll_message message;
	int fd, other;
	int *bound = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pid;

	fd = open_udp("0.0.0.0", 0);
	setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
	request_lease(&lease, "bound to a device", fd);
	port++;
	fd = open_udp(ip, 0);
	to.sin_addr.s_addr = inet_addr(ip);
	connect(fd, (void *)&to, sizeof(to));
	request_lease(&lease, "connected", fd);
	port++;
	fd = open_udp("0.0.0.0", 1);
	other = open_udp(ip, 1);
	request_lease(&lease, "less than it seems", fd);
	close(other);
	request_lease(&lease, "alone", fd);
	send_command(&lease, "open", MLL_OPEN);
	setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
	print_message("bound to a device later",
		      receive_message(lease.end, &message, NULL), &message);
	port++;
	pid = fork();
	if (!pid)
		as_user(bound);
	while (!*(volatile int *)bound)
		usleep(1000);
	request_lease(&lease, "beside another user", open_udp(ip, 1));
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

void request_as_user(void *with)
{
	int uid = *(int *)with;
	struct lease lease;
	char what[16];

	sprintf(what, "user %d", uid);
	if (setresuid(uid, uid, uid))
		err(1, "setresuid");
	request_lease(&lease, what, open_udp(ip, 0));
}

void test_users(void)
{
	static int all[] = { 65534, 65533, 0, 65534, 0 };
	unsigned int i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		run_in_child(request_as_user, all + i);
}

/*
 * Requests the next hops of ever more peers, in all slots at once, until its
 * parent ends it.
 */
void flood_requests(void)
{
	const uint64_t v4 = 0xffff00000000;
	uint32_t next = 0;
	struct mln_next_hops *hops;
	struct lease lease;
	int i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!request_lease(&lease, "one device", open_udp(ip, 0)))
		return;
	hops = mmap(NULL, sizeof(*hops), PROT_READ | PROT_WRITE, MAP_SHARED,
		    lease.next_hops, 0);
	for (;; usleep(1000)) {
		for (i = 0; i < MLN_REQUESTS; i++) {
			struct mln_request *request = hops->request + i;
			uint32_t peer = 0xc6120000 + next++ % 0x20000;

			request->local[1] = v4 | ntohl(inet_addr(ip));
			request->peer[1] = v4 | peer;
			__atomic_store_n(&request->state, MLN_REQUESTED,
					 __ATOMIC_RELEASE);
		}
	}
}

/*
 * Connects without end, as many as possible at a time, until its parent ends
 * it.
 */
void flood_connections(void)
{
	int all[64] = { 0 }, i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (i = 0;; i++) {
		int *at = all + i % 64;

		if (*at)
			close(*at);
		*at = connect_launcher();
		if (i % 3 == 0)
			send_message(*at, i % 5, NULL, NULL, 0);
	}
}
