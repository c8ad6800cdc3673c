/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A hostile program that leases queues: hostile WHAT ADDRESS PEERS.
 * It speaks with the launcher by itself, without the library, and says what it
 * gets. PEERS is the network namespace that datagrams come from.
 */
#include "hostile.h"

/* What is no question, and who says nothing. */
static void noise(void)
{
	uint32_t words[4], wrong[4], message[WORDS];
	int i, end, pipes[2], both[2], bound = udp(ip, 0);
	char bytes[64] = { 1 };

	secret(words);
	memcpy(wrong, words, sizeof(wrong));
	wrong[3] ^= 1;
	for (i = 0; i < 200; i++)
		call();
	if (pipe(pipes))
		err(1, "pipe");
#define TRY(what, send)                                        \
	do {                                                   \
		end = call();                                  \
		send;                                          \
		tell(what, hear(end, message, NULL), message); \
	} while (0)
#define ASK_FOR(what, fd)                                 \
	do {                                              \
		both[0] = fd;                             \
		TRY(what, say(end, ASK, words, both, 1)); \
	} while (0)
	TRY("a byte", send(end, bytes, 1, 0));
	TRY("too much", send(end, bytes, 64, 0));
	TRY("a wrong secret", say(end, ASK, wrong, &bound, 1));
	TRY("no socket", say(end, ASK, words, NULL, 0));
	both[0] = both[1] = bound;
	TRY("two sockets", say(end, ASK, words, both, 2));
	TRY("an order", say(end, OPEN, NULL, NULL, 0));
	ASK_FOR("a pipe", pipes[0]);
	ASK_FOR("TCP", socket(AF_INET, SOCK_STREAM, 0));
	ASK_FOR("not bound", socket(AF_INET, SOCK_DGRAM, 0));
}

/* Orders that have no meaning, and answers that nobody reads. */
static void orders(void)
{
	struct lease lease;
	uint32_t message[WORDS];
	int i;

	request_lease(&lease, "twice open", udp(ip, 0));
	order(&lease, "open", OPEN);
	order(&lease, "open", OPEN);
	port++;
	request_lease(&lease, "never open", udp(ip, 0));
	order(&lease, "close", CLOSE);
	port++;
	request_lease(&lease, "as it should be", udp(ip, 0));
	order(&lease, "open", OPEN);
	order(&lease, "close", CLOSE);
	order(&lease, "close", CLOSE);
	port++;
	request_lease(&lease, "deaf", udp(ip, 0));
	for (i = 0; i < 1000 && say(lease.end, OPEN, NULL, NULL, 0) > 0; i++)
		;
	while (hear(lease.end, message, NULL))
		;
	printf("ended\n");
}

/* A port is its socket's, not the lease's. */
static void closed(void)
{
	struct lease lease;
	uint32_t message[WORDS];
	int fd = udp(ip, 0);

	request_lease(&lease, "before", fd);
	order(&lease, "open", OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes(until(arrived, &lease, marker)));
	close(fd);
	serves("the next socket", udp(ip, 0));
	tell("the lease", hear(lease.end, message, NULL), message);
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
static void moves(void)
{
	struct lease first, second;
	uint32_t message[WORDS];
	pid_t movers[2];
	int i, fd;

	request_lease(&first, "the first", udp(ip, 0));
	order(&first, "open", OPEN);
	port++;
	fd = udp(ip, 0);
	request_lease(&second, "the second", fd);
	order(&second, "open", OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes(until(arrived, &second, marker)));
	fflush(stdout);
	for (i = 0; i < first.count; i++) {
		struct ring *rx = &first.rings[i][RX];

		memset(rx->at + rx->slots, 0xff, rx->len - rx->slots);
		/* The lock, behind the frames: nobody holds it. */
		*(volatile uint64_t *)(first.bytes[i] +
				       first.terms[i][4] * 2048UL) = 0;
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
	serves("the next socket", udp(ip, 0));
	tell("the second", hear(second.end, message, NULL), message);
	for (i = 0; i < 2; i++) {
		kill(movers[i], SIGKILL);
		waitpid(movers[i], NULL, 0);
	}
}

/* A port after the launcher's child was stopped, and its socket closed. */
static void stops(void)
{
	struct lease lease;
	uint32_t message[WORDS];
	int fd = udp(ip, 0);

	request_lease(&lease, "before", fd);
	order(&lease, "open", OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes(until(arrived, &lease, marker)));
	fflush(stdout);
	kill(server, SIGTSTP);
	usleep(300000);
	close(fd);
	serves("the next socket", udp(ip, 0));
	tell("the lease", hear(lease.end, message, NULL), message);
}

static void as_user(void *at)
{
	if (setresuid(65534, 65534, 65534))
		err(1, "setresuid");
	*(int *)at = udp("0.0.0.0", 1);
	pause();
}

/* Sockets that get only a part of what comes to their port, or will. */
static void parts(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9) };
	struct lease lease;
	uint32_t message[WORDS];
	int fd, other;
	int *bound = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pid;

	fd = udp("0.0.0.0", 0);
	setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
	request_lease(&lease, "bound to a device", fd);
	port++;
	fd = udp(ip, 0);
	to.sin_addr.s_addr = inet_addr(ip);
	connect(fd, (void *)&to, sizeof(to));
	request_lease(&lease, "connected", fd);
	port++;
	fd = udp("0.0.0.0", 1);
	other = udp(ip, 1);
	request_lease(&lease, "less than it seems", fd);
	close(other);
	request_lease(&lease, "alone", fd);
	order(&lease, "open", OPEN);
	setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3);
	tell("bound to a device later", hear(lease.end, message, NULL),
	     message);
	port++;
	pid = fork();
	if (!pid)
		as_user(bound);
	while (!*(volatile int *)bound)
		usleep(1000);
	request_lease(&lease, "beside another user", udp(ip, 1));
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

static void ask_too(void *with)
{
	struct lease lease;

	(void)with;
	if (request_lease(&lease, "another process", udp(ip, 1)))
		order(&lease, "open", OPEN);
}

static void look_at(void *with)
{
	struct lease lease, *before = with;
	struct stat ours, theirs;

	if (!request_lease(&lease, "another process", udp(ip, 1)))
		return;
	order(&lease, "open", OPEN);
	marker = "for the second";
	printf("frames: %s\n", yes(until(arrived, &lease, marker)));
	printf("seen by the first: %s\n", yes(sees(before, marker)));
	printf("left by the first: %s\n", yes(sees(&lease, "for the first")));
	fstat(lease.hops, &ours);
	fstat(before->hops, &theirs);
	printf("the same next hops: %s\n", yes(ours.st_ino == theirs.st_ino));
}

/* Who had a queue keeps what it can of it. */
static void kept(void)
{
	struct lease lease;
	int i, ring, fd = udp(ip, 1);

	request_lease(&lease, "the first", fd);
	order(&lease, "open", OPEN);
	marker = "for the first";
	printf("frames: %s\n", yes(until(arrived, &lease, marker)));
	port++;
	in_child(ask_too, NULL);
	/* It gives the lease back, and keeps the sockets and the memory. */
	port--;
	close(lease.end);
	serves("the first", fd);
	port++;
	in_child(ask_too, NULL);
	/* The memory alone. */
	for (i = 0; i < lease.count; i++) {
		for (ring = 0; ring < RINGS; ring++)
			munmap(lease.rings[i][ring].at,
			       lease.rings[i][ring].len);
		close(lease.xsk[i]);
	}
	in_child(look_at, &lease);
}

/*
 * A ring full of ones. The kernel believes a producer in any case, and takes
 * entry by entry: where it consumes, it is told of a few rings' worth only.
 */
static void scribble_ring(struct ring *ring, int is_consumed_by_kernel)
{
	if (!is_consumed_by_kernel) {
		memset(ring->at, 0xff, ring->len);
		return;
	}
	memset(ring->at + ring->slots, 0xff, ring->len - ring->slots);
	*ring->consumer = UINT32_MAX;
	*ring->producer += 3 * ring->entries;
}

/* Everything that is shared is full of ones. */
static void scribbles(void)
{
	struct lease lease;
	size_t len;
	char *at;
	int i, ring;

	request_lease(&lease, "the first", udp(ip, 0));
	order(&lease, "open", OPEN);
	len = lseek(lease.hops, 0, SEEK_END);
	at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, lease.hops, 0);
	for (i = 0; i < 100; i++) {
		int n;

		memset(at, i % 2 ? 0xff : 2, len);
		for (n = 0; n < lease.count; n++) {
			memset(lease.bytes[n], i % 2 ? 0xff : 1, lease.len[n]);
			for (ring = 0; ring < RINGS; ring++)
				scribble_ring(&lease.rings[n][ring],
					      ring == TX || ring == FILL);
		}
		send_to_port("nowhere");
		usleep(10000);
	}
	/* Files that become shorter would kill who has them mapped. */
	printf("shorter: %s\n", yes(!ftruncate(lease.hops, 0) ||
				    !ftruncate(lease.memory[0], 0)));
}

static void ask_as(void *with)
{
	int uid = *(int *)with;
	struct lease lease;
	char what[16];

	sprintf(what, "user %d", uid);
	if (setresuid(uid, uid, uid))
		err(1, "setresuid");
	request_lease(&lease, what, udp(ip, 0));
}

static void users(void)
{
	static int all[] = { 65534, 65533, 0, 65534, 0 };
	unsigned int i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		in_child(ask_as, all + i);
}

/*
 * A TCP socket with data that its peer never acknowledges: closing the last
 * descriptor of it takes an hour.
 */
static int lingering_tcp(void)
{
	static const char data[65536];
	struct linger linger = { .l_onoff = 1, .l_linger = 3600 };
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
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger));
	while (send(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
	return fd;
}

/*
 * Sends the last descriptor of a socket behind so many other messages, and
 * closes the connection. The launcher is stopped.
 */
static void send_lingering(int count, uint32_t *words)
{
	int end = call(), fd = lingering_tcp();
	pid_t pid;

	while (count--)
		say(end, OPEN, NULL, NULL, 0);
	say(end, ASK, words, &fd, 1);
	/* Who is killed does not wait for its descriptors to be closed. */
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
struct lingerer {
	int user, knows_secret, go[2], done[2];
};

static void start(struct lingerer *lingerer)
{
	struct pollfd all[2] = { { .events = POLLIN }, { .events = POLLIN } };
	uint32_t words[4];

	if (pipe(lingerer->go) || pipe(lingerer->done))
		err(1, "pipe");
	all[0].fd = syscall(SYS_pidfd_open, server, 0);
	all[1].fd = lingerer->go[0];
	fflush(stdout);
	if (fork())
		return;
	if (setresuid(lingerer->user, lingerer->user, lingerer->user))
		err(1, "setresuid");
	secret(words);
	words[3] ^= !lingerer->knows_secret;
	poll(all, 2, -1);
	if (!all[0].revents) {
		send_lingering(0, words);
		send_lingering(1, words);
		if (write(lingerer->done[1], "", 1) == 1)
			poll(all, 1, -1);
	}
	_exit(0);
}

static void linger(struct lingerer *lingerer)
{
	char path[32], byte;
	pid_t launcher = 0;
	FILE *status;

	sprintf(path, "/proc/%d/stat", server);
	status = fopen(path, "r");
	if (!status || fscanf(status, "%*d (%*[^)]) %*c %d", &launcher) != 1)
		err(1, "%s", path);
	fclose(status);
	/* All is sent before anything of it is received. */
	kill(launcher, SIGSTOP);
	usleep(100000);
	if (write(lingerer->go[1], "", 1) != 1 ||
	    read(lingerer->done[0], &byte, 1) != 1)
		errx(1, "nothing was sent");
	kill(launcher, SIGCONT);
}

static void lease_beside(void *strangers)
{
	struct lingerer *both = strangers;
	struct lease lease;

	request_lease(&lease, "before", udp(ip, 0));
	order(&lease, "open", OPEN);
	linger(both);
	linger(both + 1);
	order(&lease, "close", CLOSE);
}

/* What the launcher has to close takes its time. */
static void slow(void)
{
	static int root, other = 65534;
	static struct lingerer strangers[] = { { 65533, 0 }, { 65533, 1 } },
			       second = { 65534, 1 };

	/* Before there are queues, which they would keep. */
	start(strangers);
	start(strangers + 1);
	start(&second);
	in_child(ask_as, &other);
	in_child(lease_beside, strangers);
	in_child(ask_as, &other);
	linger(&second);
	in_child(ask_as, &root);
}

/* Calls without an end, as many as there can be at a time, until its parent ends. */
static void flood(void)
{
	int all[64] = { 0 }, i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (i = 0;; i++) {
		int *at = all + i % 64;

		if (*at)
			close(*at);
		*at = call();
		if (i % 3 == 0)
			say(*at, i % 5, NULL, NULL, 0);
	}
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = { { "noise", noise },	  { "orders", orders },
		    { "closed", closed }, { "parts", parts },
		    { "kept", kept },	  { "scribbles", scribbles },
		    { "users", users },	  { "slow", slow },
		    { "flood", flood },	  { "moves", moves },
		    { "stops", stops } };
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
