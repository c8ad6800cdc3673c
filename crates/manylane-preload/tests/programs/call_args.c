/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Unusual arguments of receives, sends and options:
 *
 *	call_args [unmapped]
 *
 * Two threads receive until the library has seen each return often. Then one
 * parks with its lane, if it has one. The other one makes the calls of a table.
 * For each call and some flows, three datagrams are sent and one is received,
 * which may prefetch the others. Then the call is made, and the remaining
 * datagrams are received. Prints the result of each call, and the datagrams
 * that were received: the same with the library as without. "unmapped": also
 * buffers that are not mapped.
 */
#define _GNU_SOURCE
#include "loopback.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <signal.h>
#include <unistd.h>

#define FLOWS 8
#define CANDIDATES 64
#define WORKERS 2
#define WARM_UP_DATAGRAMS 50
#define IOVECS_MAX 1100
#define UNMAPPED ((void *)8)

static int server;
/*
 * Chosen by one thread, and used by another one after a datagram of the first.
 */
static _Atomic int clients[CANDIDATES];
static struct sockaddr_in address;
static _Atomic unsigned received[WORKERS], last, total, parked;
static bool with_unmapped;

enum call {
	RECV,
	RECVFROM,
	READ,
	READV,
	RECVMSG,
	RECVMMSG,
	SENDTO,
	SENDMSG,
	SENDMMSG,
};

/* The unusual arguments of a call; all others are as usual. */
struct row {
	const char *name;
	enum call call;
	int flags;
	enum {
		SOME,
		NO_BYTES,
		HALF,
		NOWHERE,
		UNMAPPED_BYTES,
		NEGATIVE,
		HUGE
	} buffer_kind;
	enum {
		NAMED,
		UNNAMED,
		NO_LENGTH,
		UNMAPPED_NAME
	} name_is;
	int namelen;   /* instead of that of an address; 1 means 0 */
	size_t pieces; /* instead of one; 1 means none */
	bool no_pieces, no_message;
	int count; /* of messages, instead of two; -1 means none */
	int odd;   /* index of the unusual message */
	bool timed;
	long sec, nsec;
};

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
static const struct row rows[] = {
	{ "recv", RECV },
	{ "recv of no bytes", RECV, .buffer_kind = NO_BYTES },
	{ "recv of half", RECV, .buffer_kind = HALF },
	{ "recv of half, whole length", RECV, MSG_TRUNC, HALF },
	{ "recv to nowhere", RECV, .buffer_kind = NOWHERE },
	{ "peek to nowhere", RECV, MSG_PEEK, NOWHERE },
	{ "recv of a huge length", RECV, .buffer_kind = HUGE },
	{ "recv out of band", RECV, MSG_OOB },
	{ "recv with all other flags", RECV,
	  MSG_CONFIRM | MSG_DONTROUTE | MSG_EOR | MSG_MORE | MSG_NOSIGNAL |
		  MSG_WAITALL | MSG_WAITFORONE | MSG_FASTOPEN },
	{ "recv with unknown flags", RECV, 0x00e00000 },
	{ "recv with the flag of 32 bits", RECV, INT_MIN },
	{ "recvfrom", RECVFROM },
	{ "recvfrom without an address", RECVFROM, .name_is = UNNAMED },
	{ "recvfrom without a length", RECVFROM, .name_is = NO_LENGTH },
	{ "recvfrom with a negative length", RECVFROM, .namelen = -1 },
	{ "recvfrom with the least length", RECVFROM, .namelen = INT_MIN },
	{ "recvfrom with a short length", RECVFROM, .namelen = 5 },
	{ "recvfrom with no room", RECVFROM, .namelen = 1 },
	{ "recvfrom with a long length", RECVFROM, .namelen = INT_MAX },
	{ "recvfrom to nowhere", RECVFROM, .buffer_kind = NOWHERE },
	{ "peek with a negative length", RECVFROM, MSG_PEEK, .namelen = -5 },
	{ "read", READ },
	{ "read to nowhere", READ, .buffer_kind = NOWHERE },
	{ "read of a negative length", READ, .buffer_kind = NEGATIVE },
	{ "readv", READV, .pieces = 3 },
	{ "readv to nowhere", READV, .buffer_kind = NOWHERE },
	{ "readv of a negative length", READV, .buffer_kind = NEGATIVE },
	{ "readv of 1024 pieces", READV, .pieces = 1024 },
	{ "readv of 1025 pieces", READV, .pieces = 1025 },
	{ "readv without pieces", READV, .no_pieces = true },
	{ "recvmsg", RECVMSG },
	{ "recvmsg of nothing", RECVMSG, .no_message = true },
	{ "recvmsg of half", RECVMSG, .buffer_kind = HALF },
	{ "recvmsg to nowhere", RECVMSG, .buffer_kind = NOWHERE },
	{ "recvmsg of a negative length", RECVMSG, .buffer_kind = NEGATIVE },
	{ "recvmsg of 1024 pieces", RECVMSG, .pieces = 1024 },
	{ "recvmsg of 1025 pieces", RECVMSG, .pieces = 1025 },
	{ "recvmsg of no pieces", RECVMSG, .pieces = 1 },
	{ "recvmsg without pieces", RECVMSG, .no_pieces = true },
	{ "recvmsg with a negative length", RECVMSG, .namelen = -1 },
	{ "recvmsg with a negative length of nothing", RECVMSG,
	  .name_is = UNNAMED, .namelen = -1 },
	{ "recvmsg with no room", RECVMSG, .namelen = 1 },
	{ "recvmsg with a short length", RECVMSG, .namelen = 3 },
	{ "recvmsg with the flag of 32 bits", RECVMSG, INT_MIN },
	{ "recvmsg out of band", RECVMSG, MSG_OOB },
	{ "recvmmsg", RECVMMSG },
	{ "recvmmsg of none", RECVMMSG, .count = -1 },
	{ "recvmmsg of nothing", RECVMMSG, .no_message = true },
	{ "recvmmsg of many", RECVMMSG, .count = IOVECS_MAX },
	{ "recvmmsg, the first to nowhere", RECVMMSG, .buffer_kind = NOWHERE },
	{ "recvmmsg, the first of 1025 pieces", RECVMMSG, .pieces = 1025 },
	{ "recvmmsg, the first with a negative length", RECVMMSG,
	  .namelen = -1 },
	{ "recvmmsg with the flag of 32 bits", RECVMMSG, INT_MIN },
	{ "recvmmsg with a time", RECVMMSG, .timed = true, .sec = 5 },
	{ "recvmmsg with no time", RECVMMSG, .timed = true },
	{ "recvmmsg with the longest time", RECVMMSG, .timed = true,
	  .sec = LONG_MAX, .nsec = 999999999 },
	{ "recvmmsg with a negative time", RECVMMSG, .timed = true, .sec = -1 },
	{ "recvmmsg with negative nanoseconds", RECVMMSG, .timed = true,
	  .nsec = -1 },
	{ "recvmmsg with 1e9 nanoseconds", RECVMMSG, .timed = true,
	  .nsec = 1000000000 },
	{ "sendto", SENDTO },
	{ "sendto from nowhere", SENDTO, .buffer_kind = NOWHERE },
	{ "sendto of no bytes", SENDTO, .buffer_kind = NO_BYTES },
	{ "sendto of 70000 bytes", SENDTO, .buffer_kind = HUGE },
	{ "sendto out of band", SENDTO, MSG_OOB },
	{ "sendto without an address", SENDTO, .name_is = UNNAMED },
	{ "sendto with a negative length", SENDTO, .namelen = -1 },
	{ "sendto with a short length", SENDTO, .namelen = 8 },
	{ "sendto with no length", SENDTO, .namelen = 1 },
	{ "sendto with a long length", SENDTO, .namelen = 1000 },
	{ "sendmsg", SENDMSG },
	{ "sendmsg of nothing", SENDMSG, .no_message = true },
	{ "sendmsg from nowhere", SENDMSG, .buffer_kind = NOWHERE },
	{ "sendmsg of a negative length", SENDMSG, .buffer_kind = NEGATIVE },
	{ "sendmsg of 1025 pieces", SENDMSG, .pieces = 1025 },
	{ "sendmsg without pieces", SENDMSG, .no_pieces = true },
	{ "sendmsg with a negative length", SENDMSG, .namelen = -1 },
	{ "sendmmsg", SENDMMSG },
	{ "sendmmsg of none", SENDMMSG, .count = -1 },
	{ "sendmmsg of nothing", SENDMMSG, .no_message = true },
	{ "sendmmsg, the second from nowhere", SENDMMSG, .buffer_kind = NOWHERE,
	  .odd = 1 },
	/* Where the kernel copies all data. */
	{ "recv to what is not there", RECV, .buffer_kind = UNMAPPED_BYTES },
	{ "recvfrom, the address not there", RECVFROM,
	  .name_is = UNMAPPED_NAME },
	{ "recvmsg to what is not there", RECVMSG,
	  .buffer_kind = UNMAPPED_BYTES },
	{ "sendto from what is not there", SENDTO,
	  .buffer_kind = UNMAPPED_BYTES },
};

static char bytes[70000];
static struct iovec pieces[IOVECS_MAX];
static struct mmsghdr messages[IOVECS_MAX];
static struct sockaddr_in name, peer;

static void set_up(const struct row *row)
{
	bool sends = row->call >= SENDTO;
	void *at = row->buffer_kind == NOWHERE	      ? NULL :
		   row->buffer_kind == UNMAPPED_BYTES ? UNMAPPED :
							bytes;
	size_t len = row->buffer_kind == NO_BYTES ? 0 :
		     row->buffer_kind == HALF	  ? 2 :
		     row->buffer_kind == NEGATIVE ? SIZE_MAX - 4 :
		     row->buffer_kind == HUGE	  ? sizeof(bytes) :
						    6;
	size_t count = row->pieces == 1 ? 0 : row->pieces ? row->pieces : 1;

	memset(bytes, sends ? 's' : '.', sizeof(bytes));
	memset(&name, 0, sizeof(name));
	if (sends)
		name = peer;
	for (int i = 0; i < IOVECS_MAX; i++) {
		pieces[i] = (struct iovec){ bytes + i, i ? 1 : 6 };
		messages[i] =
			(struct mmsghdr){ .msg_hdr = { .msg_name = &name,
						       .msg_namelen =
							       sizeof(name),
						       .msg_iov = pieces,
						       .msg_iovlen = 1 },
					  .msg_len = 77 };
	}
	static struct iovec odd[IOVECS_MAX];
	struct msghdr *message = &messages[row->odd].msg_hdr;

	memcpy(odd, pieces, sizeof(odd));
	odd[0] = (struct iovec){ at, len };
	message->msg_iov = row->no_pieces ? NULL : odd;
	message->msg_iovlen = count;
	message->msg_flags = 0x1111;
	message->msg_controllen = sends ? 0 : 99;
	if (row->name_is == UNNAMED)
		message->msg_name = NULL;
	if (row->namelen)
		message->msg_namelen =
			row->namelen == 1 ? 0 : (socklen_t)row->namelen;
}

/* Makes a call, and writes its result. */
static int make_call(const struct row *row, char *out, size_t size)
{
	struct msghdr *message = &messages[row->odd].msg_hdr;
	struct timespec time = { row->sec, row->nsec };
	struct timespec *until = row->timed ? &time : NULL;
	unsigned count = row->count < 0 ? 0 : row->count ? row->count : 2;
	struct mmsghdr *all = row->no_message ? NULL : messages;
	struct iovec *parts = message->msg_iov;
	/* Hides the arguments from the C library's own checks. */
	void *volatile at = parts ? parts[0].iov_base : NULL;
	volatile size_t len = parts ? parts[0].iov_len : 0;
	socklen_t named = message->msg_namelen, *namelen = &named;
	void *volatile to = message->msg_name;
	int flags = row->flags, used;
	long got = 0;

	if (row->name_is == NO_LENGTH)
		namelen = NULL;
	if (row->name_is == UNMAPPED_NAME)
		to = UNMAPPED;
	if (row->no_message)
		message = NULL;
	errno = 0;
	switch (row->call) {
	case RECV:
		got = recv(server, at, len, flags);
		break;
	case RECVFROM:
		got = recvfrom(server, at, len, flags, to, namelen);
		break;
	case READ:
		got = read(server, at, len);
		break;
	case READV:
		got = readv(server, parts, (int)messages[0].msg_hdr.msg_iovlen);
		break;
	case RECVMSG:
		got = recvmsg(server, message, flags);
		break;
	case RECVMMSG:
		got = recvmmsg(server, all, count, flags | MSG_WAITFORONE,
			       until);
		break;
	case SENDTO:
		got = sendto(server, at, len, flags, to, named);
		break;
	case SENDMSG:
		got = sendmsg(server, message, flags);
		break;
	case SENDMMSG:
		got = sendmmsg(server, all, count, flags);
		break;
	}
	used = snprintf(out, size, "%ld %s", got,
			got < 0 ? strerrorname_np(errno) : "");
	if (row->call < SENDTO)
		used += snprintf(
			out + used, size - used,
			" %.7s of %d %d, %u %u, %u %x %zu, %u %u", bytes,
			name.sin_family, name.sin_port != 0, named,
			messages[0].msg_hdr.msg_namelen, messages[0].msg_len,
			messages[0].msg_hdr.msg_flags,
			messages[0].msg_hdr.msg_controllen, messages[1].msg_len,
			messages[1].msg_hdr.msg_flags);
	if (until && row->sec == 5 && time.tv_sec < 5)
		used += snprintf(out + used, size - used, " less is left");
	return used;
}

static void run(const struct row *row)
{
	char first[500] = "", out[500];
	socklen_t len = sizeof(peer);

	for (int flow = 0; flow < FLOWS; flow++) {
		char data[8] = "";
		int used;

		for (int i = 0; i < 3; i++) {
			char number[8] = { 'd', 'a', 't', 'a',
					   (char)('0' + i) };

			send(clients[flow], number, 5, 0);
		}
		wait_for_delivery();
		if (recvfrom(server, data, sizeof(data), MSG_DONTWAIT,
			     (void *)&peer, &len) != 5)
			printf("%s: nothing there\n", row->name);
		set_up(row);
		used = make_call(row, out, sizeof(out));
		used += snprintf(out + used, sizeof(out) - used, "; then");
		while (recv(server, data, sizeof(data), MSG_DONTWAIT) >= 0)
			used += snprintf(out + used, sizeof(out) - used,
					 " %.5s", data);
		/* Replies that are kept are sent before that. */
		close(-1);
		wait_for_delivery();
		used += snprintf(out + used, sizeof(out) - used, "; answers");
		for (ssize_t got;
		     (got = recv(clients[flow], bytes, sizeof(bytes),
				 MSG_DONTWAIT)) >= 0;)
			used += snprintf(out + used, sizeof(out) - used, " %zd",
					 got);
		if (!strcmp(first, out))
			continue;
		printf("%s: %s\n", row->name, out);
		strcpy(first, out);
	}
}

static void print_result(const char *what, long answer)
{
	printf("%s: %ld %s\n", what, answer,
	       answer < 0 ? strerrorname_np(errno) : "");
}

/* Options that are refused and change nothing; then those that do. */
static void options(void)
{
	struct timeval time = { 0, 1000000 };
	static const socklen_t lens[] = { 4, 8, 12, 15, 16 };
	int one = 1, room[4] = { 0 };
	socklen_t len = sizeof(room);
	int *volatile nowhere = NULL;
	socklen_t *volatile no_length = NULL;

#define SET(level, name, value, len)                   \
	print_result("set " #name " " #value " " #len, \
		     setsockopt(server, level, name, value, (socklen_t)len))
#define GET(level, name, value, len)                   \
	print_result("get " #name " " #value " " #len, \
		     getsockopt(server, level, name, value, len))
	SET(SOL_SOCKET, SO_RCVBUF, &one, 2);
	SET(SOL_SOCKET, SO_RCVBUF, nowhere, sizeof(one));
	SET(SOL_SOCKET, SO_RCVBUF, &one, -1);
	SET(SOL_SOCKET, SO_RCVTIMEO, &time, 8);
	SET(SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
	SET(SOL_SOCKET, SO_RCVTIMEO, nowhere, sizeof(time));
	GET(SOL_SOCKET, SO_TYPE, room, no_length);
	GET(SOL_SOCKET, SO_TYPE, nowhere, &len);
	len = -1;
	GET(SOL_SOCKET, SO_RCVTIMEO, room, &len);
	len = 0;
	GET(SOL_SOCKET, SO_RCVTIMEO, room, &len);
	GET(9999, 1, room, &len);
	/* As many bytes of the program's own timeout as there is room for. */
	time = (struct timeval){ 1, 500000 };
	SET(SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
	for (unsigned i = 0; i < sizeof(lens) / sizeof(*lens); i++) {
		unsigned char *byte = (unsigned char *)room;

		len = lens[i];
		memset(room, 0x77, sizeof(room));
		GET(SOL_SOCKET, SO_RCVTIMEO, room, &len);
		printf("%u:", len);
		for (unsigned nth = 0; nth < sizeof(room); nth++)
			printf(" %x", byte[nth]);
		printf("\n");
	}
	time = (struct timeval){ 0 };
	SET(SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
	print_result("FIONREAD to nowhere", ioctl(server, FIONREAD, nowhere));
	print_result("FIONBIO of nothing", ioctl(server, FIONBIO, nowhere));
	print_result("no ioctl", ioctl(server, 0xdeadbeef, &one));
	/* This makes the socket plain, before the options below would. */
	SET(SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one));
	SET(SOL_SOCKET, 9999, &one, sizeof(one));
	SET(9999, 1, &one, sizeof(one));
	SET(-1, 1, &one, sizeof(one));
	run(&rows[0]);
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	struct sockaddr_in from;
	socklen_t len;
	char data[16];
	ssize_t got;

	do {
		len = sizeof(from);
		got = recvfrom(server, data, sizeof(data), 0, (void *)&from,
			       &len);
		if (data[0] != 'P')
			sendto(server, data, got, 0, (void *)&from, len);
		received[nth]++;
		last = nth;
		total++;
	} while (data[0] != 'P');
	/* The first one stays away, with its lane. */
	if (!parked++) {
		pause();
		return NULL;
	}
	pin_to_this_cpu();
	while (recv(server, data, sizeof(data), MSG_DONTWAIT) >= 0)
		;
	for (int i = 0; i < FLOWS; i++)
		while (recv(clients[i], data, sizeof(data), MSG_DONTWAIT) >= 0)
			;
	for (size_t at = 0; at < sizeof(rows) / sizeof(*rows); at++)
		if (with_unmapped || (rows[at].buffer_kind != UNMAPPED_BYTES &&
				      rows[at].name_is != UNMAPPED_NAME))
			run(&rows[at]);
	options();
	fflush(stdout);
	_exit(0);
}

/* Sends from a client, and waits until a worker has received it. */
static void send_and_wait(int client)
{
	unsigned want = total + 1;

	send(client, "0123456789", 10, 0);
	while (total < want)
		usleep(50);
}

/*
 * Chooses clients among the candidates so that half of them are in each
 * worker's lane, whatever their ports are. Without lanes any will do.
 */
static void choose_clients(void)
{
	unsigned of[WORKERS] = { 0 }, chosen = 0;

	for (unsigned i = 0; i < CANDIDATES && chosen < FLOWS; i++) {
		int client = clients[i];

		send_and_wait(client);
		if (of[last] == FLOWS / WORKERS)
			continue;
		of[last]++;
		clients[i] = clients[chosen];
		clients[chosen++] = client;
	}
}

int main(int argc, char **argv)
{
	pthread_t thread;

	/* No process outlives the test, and nothing waits forever. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(300);
	with_unmapped = argc > 1 && !strcmp(argv[1], "unmapped");
	server = loopback_server(0, &address);
	for (int i = 0; i < CANDIDATES; i++) {
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
		connect(clients[i], (void *)&address, sizeof(address));
	}
	for (int i = 0; i < WORKERS; i++)
		pthread_create(&thread, NULL, worker, (void *)(long)i);
	for (int ready = 0; ready < WORKERS;) {
		for (int i = 0; i < CANDIDATES; i++)
			send_and_wait(clients[i]);
		ready = 0;
		for (int i = 0; i < WORKERS; i++)
			ready += received[i] >= WARM_UP_DATAGRAMS;
	}
	choose_clients();
	for (unsigned i = 0; i < WORKERS; i++) {
		send(clients[0], "P", 1, 0);
		while (parked <= i)
			usleep(50);
	}
	pause();
	return 1;
}
