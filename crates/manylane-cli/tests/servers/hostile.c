/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A hostile program that leases queues: hostile WHAT ADDRESS PEERS.
 * It speaks with the launcher by itself, without the library, and says what it
 * gets. PEERS is the network namespace that datagrams come from.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_xdp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS 9
#define MAGIC 0x324e4c4d
#define MOST 32
#define PATIENCE 20 /* seconds */

enum {
	ASK = 1,
	OPEN,
	CLOSE,
	DONE,
	REFUSED,
	QUEUE
};

/* What one socket was leased. */
struct lease {
	int end, count;
	int hops, xsk[MOST], memory[MOST];
	uint32_t terms[MOST][WORDS];
	char *rx[MOST], *bytes[MOST];
	size_t rx_len[MOST], len[MOST];
};

static const char *ip;
static int port = 7100, peer;
static pid_t server; /* what runs after this, or beside it */

static int say(int end, uint32_t kind, const uint32_t *words, const int *fds,
	       int count)
{
	uint32_t message[WORDS] = { MAGIC, kind };
	struct iovec part = { message, sizeof(message) };
	char room[CMSG_SPACE(4 * sizeof(int))]
		__attribute__((aligned(8))) = { 0 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };

	if (words)
		memcpy(message + 2, words, 4 * sizeof(uint32_t));
	if (count) {
		struct cmsghdr *control = (void *)room;

		header.msg_control = room;
		header.msg_controllen = CMSG_SPACE(count * sizeof(int));
		control->cmsg_level = SOL_SOCKET;
		control->cmsg_type = SCM_RIGHTS;
		control->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(control), fds, count * sizeof(int));
	}
	return sendmsg(end, &header, MSG_NOSIGNAL);
}

/* The kind of the message that comes, 0 when the other end is closed. */
static uint32_t hear(int end, uint32_t *message, int *fds)
{
	struct iovec part = { message, WORDS * sizeof(uint32_t) };
	char room[CMSG_SPACE(4 * sizeof(int))] __attribute__((aligned(8)));
	struct msghdr header = { .msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = room,
				 .msg_controllen = sizeof(room) };
	struct cmsghdr *control;
	ssize_t len = recvmsg(end, &header, 0);

	/* What it had not read when it closed comes back as this error. */
	if (len < 0 && errno != ECONNRESET)
		err(1, "nothing from the launcher");
	if (len <= 0)
		return 0;
	control = CMSG_FIRSTHDR(&header);
	if (control && fds)
		memcpy(fds, CMSG_DATA(control),
		       control->cmsg_len - CMSG_LEN(0));
	return message[1];
}

static const char *ticket(void)
{
	const char *text = getenv("MANYLANE_LEASE_SOCKET");

	if (!text || strlen(text) != 48)
		errx(1, "no launcher that leases");
	return text;
}

static void secret(uint32_t *words)
{
	char digits[9] = { 0 };
	int i;

	for (i = 0; i < 4; i++) {
		memcpy(digits, ticket() + 16 + 8 * i, 8);
		words[i] = strtoul(digits, NULL, 16);
	}
}

static int call(void)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	struct timeval patience = { .tv_sec = PATIENCE };
	int end = socket(AF_UNIX, SOCK_SEQPACKET, 0), len;

	setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	len = sprintf(at.sun_path + 1, "manylane.lease.%.16s", ticket());
	if (connect(end, (void *)&at,
		    offsetof(struct sockaddr_un, sun_path) + 1 + len))
		err(1, "connect");
	return end;
}

static void tell(const char *what, uint32_t kind, const uint32_t *message)
{
	if (kind == REFUSED)
		printf("%s: refused %d\n", what, (int)message[2]);
	else if (kind == DONE)
		printf("%s: done\n", what);
	else
		printf("%s: closed\n", what);
	fflush(stdout);
}

static int udp(const char *at, int reuse)
{
	struct timeval soon = { .tv_usec = 50000 };
	struct sockaddr_in local = { .sin_family = AF_INET,
				     .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	inet_pton(AF_INET, at, &local.sin_addr);
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof(soon));
	if (bind(fd, (void *)&local, sizeof(local)))
		err(1, "bind");
	return fd;
}

static size_t map_ring(int xsk, uint32_t entries, char **at)
{
	struct xdp_mmap_offsets offsets;
	socklen_t len = sizeof(offsets);
	size_t bytes;

	if (getsockopt(xsk, SOL_XDP, XDP_MMAP_OFFSETS, &offsets, &len))
		err(1, "offsets");
	bytes = offsets.rx.desc + entries * sizeof(struct xdp_desc);
	*at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, xsk,
		   XDP_PGOFF_RX_RING);
	if (*at == MAP_FAILED)
		err(1, "a ring");
	return bytes;
}

/* Asks for a socket: whether there are queues. */
static int request_lease(struct lease *lease, const char *what, int fd)
{
	uint32_t words[4], message[WORDS], kind;
	int i, fds[4];

	secret(words);
	lease->end = call();
	say(lease->end, ASK, words, &fd, 1);
	kind = hear(lease->end, message, &lease->hops);
	if (kind != DONE) {
		tell(what, kind, message);
		return 0;
	}
	lease->count = message[2];
	for (i = 0; i < lease->count; i++) {
		struct stat stat;

		if (hear(lease->end, lease->terms[i], fds) != QUEUE)
			errx(1, "no queue");
		lease->xsk[i] = fds[0];
		lease->memory[i] = fds[1];
		fstat(fds[1], &stat);
		lease->len[i] = stat.st_size;
		lease->bytes[i] =
			mmap(NULL, stat.st_size, PROT_READ | PROT_WRITE,
			     MAP_SHARED, fds[1], 0);
		lease->rx_len[i] =
			map_ring(fds[0], lease->terms[i][6], &lease->rx[i]);
	}
	printf("%s: leased %d\n", what, lease->count);
	fflush(stdout);
	return 1;
}

static void order(struct lease *lease, const char *what, uint32_t kind)
{
	uint32_t message[WORDS];

	say(lease->end, kind, NULL, NULL, 0);
	tell(what, hear(lease->end, message, NULL), message);
}

static void send_to_port(const char *text)
{
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_port = htons(port) };

	inet_pton(AF_INET, ip, &to.sin_addr);
	sendto(peer, text, strlen(text), 0, (void *)&to, sizeof(to));
}

static int has(const char *bytes, size_t len, const char *text)
{
	return memmem(bytes, len, text, strlen(text)) != NULL;
}

static int sees(const struct lease *lease, const char *text)
{
	int i, found = 0;

	for (i = 0; i < lease->count; i++)
		found |= has(lease->bytes[i], lease->len[i], text);
	return found;
}

/* Sends until `is` holds. */
static int until(int (*is)(void *), void *with, const char *text)
{
	int tries;

	for (tries = 0; tries < PATIENCE * 50; tries++) {
		send_to_port(text);
		usleep(20000);
		if (is(with))
			return 1;
	}
	return 0;
}

static const char *marker;

static int arrived(void *lease)
{
	return sees(lease, marker);
}

static int received(void *fd)
{
	char data[64];

	return recv(*(int *)fd, data, sizeof(data), 0) > 0;
}

static const char *yes(int is)
{
	return is ? "yes" : "no";
}

/* Whether datagrams come to the socket itself. */
static void serves(const char *what, int fd)
{
	printf("%s: %s\n", what, yes(until(received, &fd, "to the socket")));
	fflush(stdout);
}

static void in_child(void (*what)(void *), void *with)
{
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		what(with);
		fflush(stdout);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	if (status)
		errx(1, "a child ended with %d", status);
}

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
	int i, fd = udp(ip, 1);

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
		munmap(lease.rx[i], lease.rx_len[i]);
		close(lease.xsk[i]);
	}
	in_child(look_at, &lease);
}

/* Everything that is shared is full of ones. */
static void scribbles(void)
{
	struct lease lease;
	size_t len;
	char *at;
	int i;

	request_lease(&lease, "the first", udp(ip, 0));
	order(&lease, "open", OPEN);
	len = lseek(lease.hops, 0, SEEK_END);
	at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, lease.hops, 0);
	for (i = 0; i < 100; i++) {
		int n;

		memset(at, i % 2 ? 0xff : 2, len);
		for (n = 0; n < lease.count; n++) {
			memset(lease.bytes[n], i % 2 ? 0xff : 1, lease.len[n]);
			memset(lease.rx[n], 0xff, lease.rx_len[n]);
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
		    { "flood", flood } };
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
