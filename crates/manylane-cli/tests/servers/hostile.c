/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A hostile program that leases queues: hostile WHAT ADDRESS PEERS. It talks to
 * the launcher directly, without the library, and prints what it gets. PEERS is
 * the network namespace that datagrams come from.
 */
#include "hostile.h"

/* Messages that are no requests, and a client that sends nothing. */
static void test_invalid_messages(void)
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
static void test_invalid_commands(void)
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

/* A port belongs to its socket, not to the lease. */
static void test_closed_socket(void)
{
	struct lease lease;
	struct mll_message message;
	int fd = open_udp(ip, 0);

	request_lease(&lease, "before", fd);
	send_command(&lease, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the lease", receive_message(lease.end, &message, NULL),
		      &message);
}

/* Moves the producers of a lease's RX rings until its parent ends it. */
static void move_producers(struct lease *lease)
{
	int i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;)
		for (i = 0; i < lease->count; i++) {
			struct ring *rx = &lease->rings[i][RX];

			*rx->producer = *rx->consumer + rx->entries / 2;
		}
}

/* Rings that never become empty, at the end of a lease. */
static void test_moving_producers(void)
{
	struct lease first, second;
	struct mll_message message;
	pid_t movers[2];
	int i, fd;

	request_lease(&first, "the first", open_udp(ip, 0));
	send_command(&first, "open", MLL_OPEN);
	port++;
	fd = open_udp(ip, 0);
	request_lease(&second, "the second", fd);
	send_command(&second, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &second, marker)));
	fflush(stdout);
	for (i = 0; i < first.count; i++) {
		struct ring *rx = &first.rings[i][RX];

		memset(rx->at + rx->slots, 0xff, rx->len - rx->slots);
		/* The lock, behind the frames: not held. */
		*(volatile uint64_t *)(first.bytes[i] +
				       first.terms[i].frames * 2048UL) = 0;
	}
	for (i = 0; i < 2; i++) {
		movers[i] = fork();
		if (movers[i])
			continue;
		close(first.end);
		close(second.end);
		close(fd);
		move_producers(&first);
	}
	usleep(100000);
	close(first.end);
	usleep(100000);
	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the second", receive_message(second.end, &message, NULL),
		      &message);
	for (i = 0; i < 2; i++) {
		kill(movers[i], SIGKILL);
		waitpid(movers[i], NULL, 0);
	}
}

/* A port after the launcher's child was stopped, and its socket closed. */
static void test_stopped_child(void)
{
	struct lease lease;
	struct mll_message message;
	int fd = open_udp(ip, 0);

	request_lease(&lease, "before", fd);
	send_command(&lease, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
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
static void test_partial_sockets(void)
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

static void request_second_lease(void *with)
{
	struct lease lease;

	(void)with;
	if (request_lease(&lease, "another process", open_udp(ip, 1)))
		send_command(&lease, "open", MLL_OPEN);
}

static void inspect_lease(void *with)
{
	struct lease lease, *before = with;
	struct stat ours, theirs;

	if (!request_lease(&lease, "another process", open_udp(ip, 1)))
		return;
	send_command(&lease, "open", MLL_OPEN);
	marker = "for the second";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	printf("seen by the first: %s\n",
	       yes_or_no(ring_contains(before, marker)));
	printf("left by the first: %s\n",
	       yes_or_no(ring_contains(&lease, "for the first")));
	fstat(lease.hops, &ours);
	fstat(before->hops, &theirs);
	printf("the same next hops: %s\n",
	       yes_or_no(ours.st_ino == theirs.st_ino));
}

/* A process that had a queue keeps as much of it as it can. */
static void test_kept_queues(void)
{
	struct lease lease;
	int i, ring, fd = open_udp(ip, 1);

	request_lease(&lease, "the first", fd);
	send_command(&lease, "open", MLL_OPEN);
	marker = "for the first";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	port++;
	run_in_child(request_second_lease, NULL);
	/* It returns the lease, and keeps the sockets and the memory. */
	port--;
	close(lease.end);
	serves("the first", fd);
	port++;
	run_in_child(request_second_lease, NULL);
	/* Only the memory. */
	for (i = 0; i < lease.count; i++) {
		for (ring = 0; ring < RINGS; ring++)
			munmap(lease.rings[i][ring].at,
			       lease.rings[i][ring].len);
		close(lease.xsk[i]);
	}
	run_in_child(inspect_lease, &lease);
}

/*
 * Fills a ring with ones. The kernel always believes a producer, and processes
 * entry by entry: a ring that it consumes gets only a few rings' worth.
 */
static void corrupt_ring(struct ring *ring, int is_consumed_by_kernel)
{
	if (!is_consumed_by_kernel) {
		memset(ring->at, 0xff, ring->len);
		return;
	}
	memset(ring->at + ring->slots, 0xff, ring->len - ring->slots);
	*ring->consumer = UINT32_MAX;
	*ring->producer += 3 * ring->entries;
}

/* All shared memory is full of ones. */
static void test_corrupt_memory(void)
{
	struct lease lease;
	size_t len;
	char *at;
	int i, ring;

	request_lease(&lease, "the first", open_udp(ip, 0));
	send_command(&lease, "open", MLL_OPEN);
	len = lseek(lease.hops, 0, SEEK_END);
	at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, lease.hops, 0);
	for (i = 0; i < 100; i++) {
		int n;

		memset(at, i % 2 ? 0xff : 2, len);
		for (n = 0; n < lease.count; n++) {
			memset(lease.bytes[n], i % 2 ? 0xff : 1, lease.len[n]);
			for (ring = 0; ring < RINGS; ring++)
				corrupt_ring(&lease.rings[n][ring],
					     ring == TX || ring == FILL);
		}
		send_to_port("nowhere");
		usleep(10000);
	}
	/* Truncated files would kill the processes that have them mapped. */
	printf("shorter: %s\n", yes_or_no(!ftruncate(lease.hops, 0) ||
					  !ftruncate(lease.memory[0], 0)));
}

static void request_as_user(void *with)
{
	int uid = *(int *)with;
	struct lease lease;
	char what[16];

	sprintf(what, "user %d", uid);
	if (setresuid(uid, uid, uid))
		err(1, "setresuid");
	request_lease(&lease, what, open_udp(ip, 0));
}

static void test_users(void)
{
	static int all[] = { 65534, 65533, 0, 65534, 0 };
	unsigned int i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		run_in_child(request_as_user, all + i);
}

/*
 * Opens a TCP socket with data that its peer never acknowledges: closing its
 * last descriptor takes an hour.
 */
static int slow_closing_tcp(void)
{
	static const char data[65536];
	struct linger slow = { .l_onoff = 1, .l_linger = 3600 };
	struct sockaddr_in at = { .sin_family = AF_INET };
	socklen_t len = sizeof(at);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(listener, (void *)&at, sizeof(at)) || listen(listener, 1) ||
	    getsockname(listener, (void *)&at, &len) ||
	    connect(fd, (void *)&at, sizeof(at)) ||
	    accept(listener, NULL, NULL) < 0)
		err(1, "TCP");
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &slow, sizeof(slow));
	while (send(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
	return fd;
}

/*
 * Sends the last descriptor of a socket behind `count` other messages, and
 * closes the connection. The launcher is stopped.
 */
static void send_slow_closing(int count, uint32_t *words)
{
	int end = connect_launcher(), fd = slow_closing_tcp();
	pid_t pid;

	while (count--)
		send_message(end, MLL_OPEN, NULL, NULL, 0);
	send_message(end, MLL_REQUEST, words, &fd, 1);
	/* A killed process does not wait for its descriptors to be closed. */
	pid = fork();
	if (!pid)
		for (;;)
			pause();
	close(fd);
	close(end);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

/* A process that sends such descriptors when told, and ends with the server. */
struct slow_closer {
	int user, knows_secret, go[2], done[2];
	pid_t pid;
};

static void start_slow_closer(struct slow_closer *slow_closer)
{
	struct pollfd all[2] = { { .events = POLLIN }, { .events = POLLIN } };
	uint32_t words[4];

	if (pipe(slow_closer->go) || pipe(slow_closer->done))
		err(1, "pipe");
	all[0].fd = syscall(SYS_pidfd_open, server, 0);
	all[1].fd = slow_closer->go[0];
	fflush(stdout);
	slow_closer->pid = fork();
	if (slow_closer->pid)
		return;
	if (setresuid(slow_closer->user, slow_closer->user, slow_closer->user))
		err(1, "setresuid");
	secret(words);
	words[3] ^= !slow_closer->knows_secret;
	poll(all, 2, -1);
	if (!all[0].revents) {
		send_slow_closing(0, words);
		send_slow_closing(1, words);
		if (write(slow_closer->done[1], "", 1) == 1)
			poll(all, 1, -1);
	}
	_exit(0);
}

static pid_t find_launcher(void)
{
	char path[32];
	pid_t launcher = 0;
	FILE *status;

	sprintf(path, "/proc/%d/stat", server);
	status = fopen(path, "r");
	if (!status || fscanf(status, "%*d (%*[^)]) %*c %d", &launcher) != 1)
		err(1, "%s", path);
	fclose(status);
	return launcher;
}

static void send_slow_fd(struct slow_closer *slow_closer)
{
	pid_t launcher = find_launcher();
	char byte;

	/* Everything is sent before any of it is received. */
	kill(launcher, SIGSTOP);
	usleep(100000);
	if (write(slow_closer->go[1], "", 1) != 1 ||
	    read(slow_closer->done[0], &byte, 1) != 1)
		errx(1, "nothing was sent");
	kill(launcher, SIGCONT);
}

static void lease_beside(void *other_users)
{
	struct slow_closer *both = other_users;
	struct lease lease;

	request_lease(&lease, "before", open_udp(ip, 0));
	send_command(&lease, "open", MLL_OPEN);
	send_slow_fd(both);
	send_slow_fd(both + 1);
	send_command(&lease, "close", MLL_CLOSE);
}

/* The launcher's closes take long. */
static void test_slow_closes(void)
{
	static int root, other = 65534;
	static struct slow_closer other_users[] = { { 65533, 0 },
						    { 65533, 1 } },
				  second = { 65534, 1 };

	/* Before there are queues, which they would keep. */
	start_slow_closer(other_users);
	start_slow_closer(other_users + 1);
	start_slow_closer(&second);
	run_in_child(request_as_user, &other);
	run_in_child(lease_beside, other_users);
	run_in_child(request_as_user, &other);
	send_slow_fd(&second);
	run_in_child(request_as_user, &root);
}

/*
 * Connects and sends a descriptor each time, until the launcher has accepted no
 * connection for a second.
 */
static int connect_until_full(void)
{
	int i, end, tries = 0, null = open("/dev/null", O_RDONLY);

	for (i = 0; i < 10000; i++) {
		end = try_connect_launcher(SOCK_NONBLOCK);
		if (end >= 0) {
			send_message(end, MLL_OPEN, NULL, &null, 1);
			close(end);
			tries = 0;
		} else if (errno != EAGAIN) {
			err(1, "connect");
		} else if (++tries == 100) {
			return 1;
		} else {
			usleep(10000);
		}
	}
	return 0;
}

static int count_descriptors(pid_t pid)
{
	struct dirent *entry;
	int count = 0;
	char path[32];
	DIR *all;

	sprintf(path, "/proc/%d/fd", pid);
	all = opendir(path);
	while (all && (entry = readdir(all)))
		count += entry->d_name[0] != '.';
	if (all)
		closedir(all);
	return count;
}

/*
 * Strangers have made as many connections as the launcher accepts, from two
 * processes, when a socket is closed: they wait behind a descriptor that cannot
 * be closed.
 */
static void test_full_launcher(void)
{
	static struct slow_closer stranger = { 65533, 0 };
	struct rlimit before, few = { .rlim_cur = 256 };
	struct mll_message message;
	struct lease lease;
	pid_t other;
	int fd;

	start_slow_closer(&stranger);
	fd = open_udp(ip, 0);
	request_lease(&lease, "before", fd);
	send_command(&lease, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	fflush(stdout);
	if (prlimit(find_launcher(), RLIMIT_NOFILE, NULL, &before))
		err(1, "prlimit");
	few.rlim_max = before.rlim_max;
	if (prlimit(find_launcher(), RLIMIT_NOFILE, &few, NULL))
		err(1, "prlimit");
	send_slow_fd(&stranger);
	other = fork();
	if (!other)
		_exit(connect_until_full());
	printf("connected until nobody accepts: %s\n",
	       yes_or_no(connect_until_full()));
	waitpid(other, NULL, 0);
	printf("half of the descriptors are free: %s\n",
	       yes_or_no(count_descriptors(find_launcher()) < 128));
	fflush(stdout);
	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the lease", receive_message(lease.end, &message, NULL),
		      &message);
	/* With its peer, the descriptor can be closed. */
	kill(stranger.pid, SIGKILL);
	waitpid(stranger.pid, NULL, 0);
	prlimit(find_launcher(), RLIMIT_NOFILE, &before, NULL);
}

/*
 * Requests the next hops of ever more peers, in all slots at once, until its
 * parent ends it.
 */
static void flood_requests(void)
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
		    lease.hops, 0);
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
static void flood_connections(void)
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

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = { { "invalid", test_invalid_messages },
		    { "commands", test_invalid_commands },
		    { "closed", test_closed_socket },
		    { "partial", test_partial_sockets },
		    { "kept", test_kept_queues },
		    { "corrupt", test_corrupt_memory },
		    { "users", test_users },
		    { "slow", test_slow_closes },
		    { "flood", flood_connections },
		    { "full", test_full_launcher },
		    { "queries", flood_requests },
		    { "producers", test_moving_producers },
		    { "stopped", test_stopped_child } };
	int ours = open("/proc/self/ns/net", O_RDONLY), theirs;
	unsigned int i;

	if (argc != 4)
		errx(2, "hostile WHAT ADDRESS PEERS");
	ip = argv[2];
	server = getppid();
	theirs = open(argv[3], O_RDONLY);
	if (setns(theirs, CLONE_NEWNET))
		err(1, "setns");
	peer = socket(AF_INET, SOCK_DGRAM, 0);
	if (setns(ours, CLONE_NEWNET))
		err(1, "setns");
	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (!strcmp(argv[1], all[i].name))
			all[i].run();
	return 0;
}
