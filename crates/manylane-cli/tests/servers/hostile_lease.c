/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Messages to the launcher, its leases, and datagrams for them. */
#include "hostile.h"

const char *ip, *marker;
int port = 7100, peer;
pid_t server;

int send_message(int end, uint32_t kind, const uint32_t *words, const int *fds,
		 int count)
{
	struct mll_message message = { .magic = MLL_MAGIC, .kind = kind };
	struct iovec part = { &message, sizeof(message) };
	char room[CMSG_SPACE(4 * sizeof(int))]
		__attribute__((aligned(8))) = { 0 };
	struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };

	if (words)
		memcpy(message.secret, words, sizeof(message.secret));
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

uint32_t receive_message(int end, struct mll_message *message, int *fds)
{
	struct iovec part = { message, sizeof(*message) };
	char room[CMSG_SPACE(4 * sizeof(int))] __attribute__((aligned(8)));
	struct msghdr header = { .msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = room,
				 .msg_controllen = sizeof(room) };
	struct cmsghdr *control;
	ssize_t len = recvmsg(end, &header, 0);

	/* Unread data at its close is reported as this error. */
	if (len < 0 && errno != ECONNRESET)
		err(1, "nothing from the launcher");
	if (len <= 0)
		return 0;
	control = CMSG_FIRSTHDR(&header);
	if (control && fds)
		memcpy(fds, CMSG_DATA(control),
		       control->cmsg_len - CMSG_LEN(0));
	return message->kind;
}

static const char *ticket(void)
{
	const char *text = getenv("MANYLANE_LEASE_SOCKET");

	if (!text || strlen(text) != 48)
		errx(1, "no launcher that leases");
	return text;
}

void secret(uint32_t *words)
{
	char digits[9] = { 0 };
	int i;

	for (i = 0; i < 4; i++) {
		memcpy(digits, ticket() + 16 + 8 * i, 8);
		words[i] = strtoul(digits, NULL, 16);
	}
}

int try_connect_launcher(int flags)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	struct timeval timeout = { .tv_sec = TIMEOUT_S };
	int end = socket(AF_UNIX, SOCK_SEQPACKET | flags, 0), len;

	setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	len = sprintf(at.sun_path + 1, "manylane.lease.%.16s", ticket());
	if (connect(end, (void *)&at,
		    offsetof(struct sockaddr_un, sun_path) + 1 + len)) {
		close(end);
		return -1;
	}
	return end;
}

int connect_launcher(void)
{
	int end = try_connect_launcher(0);

	if (end < 0)
		err(1, "connect");
	return end;
}

void print_message(const char *what, uint32_t kind,
		   const struct mll_message *message)
{
	if (kind == MLL_REFUSED)
		printf("%s: refused %d\n", what, message->error);
	else if (kind == MLL_OPENED || kind == MLL_CLOSED)
		printf("%s: done\n", what);
	else
		printf("%s: closed\n", what);
	fflush(stdout);
}

int open_udp(const char *at, int reuse)
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

static void map_ring(int xsk, int which, uint32_t entries, struct ring *ring)
{
	static const off_t pages[RINGS] = {
		[RX] = XDP_PGOFF_RX_RING,
		[COMPLETION] = XDP_UMEM_PGOFF_COMPLETION_RING,
		[TX] = XDP_PGOFF_TX_RING,
		[FILL] = XDP_UMEM_PGOFF_FILL_RING,
	};
	struct xdp_mmap_offsets all;
	socklen_t len = sizeof(all);
	const struct xdp_ring_offset *offsets[RINGS] = {
		[RX] = &all.rx,
		[COMPLETION] = &all.cr,
		[TX] = &all.tx,
		[FILL] = &all.fr,
	};
	size_t each = which == RX || which == TX ? sizeof(struct xdp_desc) :
						   sizeof(uint64_t);

	if (getsockopt(xsk, SOL_XDP, XDP_MMAP_OFFSETS, &all, &len))
		err(1, "offsets");
	ring->entries = entries;
	ring->slots = offsets[which]->desc;
	ring->len = ring->slots + entries * each;
	ring->at = mmap(NULL, ring->len, PROT_READ | PROT_WRITE, MAP_SHARED,
			xsk, pages[which]);
	if (ring->at == MAP_FAILED)
		err(1, "a ring");
	ring->producer = (void *)(ring->at + offsets[which]->producer);
	ring->consumer = (void *)(ring->at + offsets[which]->consumer);
}

int request_lease(struct lease *lease, const char *what, int fd)
{
	struct mll_message message;
	uint32_t words[4], kind;
	int i, ring, fds[4];

	secret(words);
	lease->end = connect_launcher();
	send_message(lease->end, MLL_REQUEST, words, &fd, 1);
	kind = receive_message(lease->end, &message, &lease->next_hops);
	if (kind != MLL_GRANTED) {
		print_message(what, kind, &message);
		return 0;
	}
	lease->count = message.queues;
	for (i = 0; i < lease->count; i++) {
		struct stat stat;

		if (receive_message(lease->end, &message, fds) != MLL_QUEUE)
			errx(1, "no queue");
		lease->terms[i] = message.queue;
		lease->xsk[i] = fds[0];
		lease->memory[i] = fds[1];
		fstat(fds[1], &stat);
		lease->len[i] = stat.st_size;
		lease->bytes[i] =
			mmap(NULL, stat.st_size, PROT_READ | PROT_WRITE,
			     MAP_SHARED, fds[1], 0);
		for (ring = 0; ring < RINGS; ring++) {
			int is_shared = ring == FILL || ring == COMPLETION;

			map_ring(fds[0], ring,
				 is_shared ? message.queue.umem_ring_size :
					     message.queue.ring_size,
				 &lease->rings[i][ring]);
		}
	}
	printf("%s: leased %d\n", what, lease->count);
	fflush(stdout);
	return 1;
}

void send_command(struct lease *lease, const char *what, uint32_t kind)
{
	struct mll_message message;

	send_message(lease->end, kind, NULL, NULL, 0);
	print_message(what, receive_message(lease->end, &message, NULL),
		      &message);
}

void send_to_port(const char *text)
{
	struct sockaddr_in to = { .sin_family = AF_INET,
				  .sin_port = htons(port) };

	inet_pton(AF_INET, ip, &to.sin_addr);
	sendto(peer, text, strlen(text), 0, (void *)&to, sizeof(to));
}

static int contains(const char *bytes, size_t len, const char *text)
{
	return memmem(bytes, len, text, strlen(text)) != NULL;
}

int ring_contains(const struct lease *lease, const char *text)
{
	int i, found = 0;

	for (i = 0; i < lease->count; i++)
		found |= contains(lease->bytes[i], lease->len[i], text);
	return found;
}

int send_until(int (*is)(void *), void *with, const char *text)
{
	int tries;

	for (tries = 0; tries < TIMEOUT_S * 50; tries++) {
		send_to_port(text);
		usleep(20000);
		if (is(with))
			return 1;
	}
	return 0;
}

int arrived(void *lease)
{
	return ring_contains(lease, marker);
}

static int received(void *fd)
{
	char data[64];

	return recv(*(int *)fd, data, sizeof(data), 0) > 0;
}

const char *yes_or_no(int is)
{
	return is ? "yes" : "no";
}

void serves(const char *what, int fd)
{
	printf("%s: %s\n", what,
	       yes_or_no(send_until(received, &fd, "to the socket")));
	fflush(stdout);
}

void run_in_child(void (*what)(void *), void *with)
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
