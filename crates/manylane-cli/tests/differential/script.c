/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Steps as text, and their results as text. */
#include "differential.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#define NAME(name)                \
	{                         \
#name, (long)name \
	}
static const struct {
	const char *name;
	long value;
} names[] = {
	NAME(AF_INET),		NAME(AF_INET6),		NAME(AF_UNIX),
	NAME(SOCK_DGRAM),	NAME(SOCK_STREAM),	NAME(SOCK_NONBLOCK),
	NAME(SOCK_CLOEXEC),	NAME(MSG_DONTWAIT),	NAME(MSG_PEEK),
	NAME(MSG_TRUNC),	NAME(MSG_WAITALL),	NAME(MSG_ERRQUEUE),
	NAME(MSG_OOB),		NAME(MSG_NOSIGNAL),	NAME(MSG_CONFIRM),
	NAME(MSG_WAITFORONE),	NAME(MSG_CMSG_CLOEXEC), NAME(POLLIN),
	NAME(POLLOUT),		NAME(POLLPRI),		NAME(POLLRDNORM),
	NAME(POLLRDHUP),	NAME(EPOLLIN),		NAME(EPOLLOUT),
	NAME(EPOLLET),		NAME(EPOLLONESHOT),	NAME(EPOLLEXCLUSIVE),
	NAME(EPOLL_CTL_ADD),	NAME(EPOLL_CTL_MOD),	NAME(EPOLL_CTL_DEL),
	NAME(O_CLOEXEC),	NAME(O_NONBLOCK),	NAME(F_GETFD),
	NAME(F_SETFD),		NAME(F_GETFL),		NAME(F_SETFL),
	NAME(F_DUPFD),		NAME(F_DUPFD_CLOEXEC),	NAME(FD_CLOEXEC),
	NAME(SHUT_RD),		NAME(SHUT_WR),		NAME(SHUT_RDWR),
	NAME(SOL_SOCKET),	NAME(SOL_IP),		NAME(SOL_IPV6),
	NAME(SOL_TCP),		NAME(SO_REUSEADDR),	NAME(SO_REUSEPORT),
	NAME(SO_RCVTIMEO),	NAME(SO_SNDTIMEO),	NAME(SO_RCVBUF),
	NAME(SO_SNDBUF),	NAME(SO_BROADCAST),	NAME(SO_TYPE),
	NAME(SO_ERROR),		NAME(SO_RXQ_OVFL),	NAME(SO_TIMESTAMP),
	NAME(SO_PRIORITY),	NAME(SO_RCVLOWAT),	NAME(IP_TOS),
	NAME(IP_TTL),		NAME(IP_PKTINFO),	NAME(IP_RECVTTL),
	NAME(IP_RECVTOS),	NAME(IP_RECVERR),	NAME(IPV6_V6ONLY),
	NAME(IPV6_RECVPKTINFO),
};

_Thread_local struct log *current_log;

void print(const char *format, ...)
{
	struct log *log = current_log ? current_log : &shared->log;
	int saved = errno, room = (int)(LOG - log->len), len;
	va_list list;

	va_start(list, format);
	len = vsnprintf(log->text + log->len, (size_t)room, format, list);
	va_end(list);
	log->len += (size_t)(len < room ? len : room - 1);
	errno = saved;
}

void print_result(long result)
{
	if (result < 0)
		print(" = %ld %s", result, strerrorname_np(errno));
	else
		print(" = %ld", result);
}

static struct argument value_of(char *text)
{
	struct argument arg = { .slot = -1 };
	char *end, *rest;

	if (*text == 's' && text[1] >= '0' && text[1] <= '9') {
		arg.slot = atoi(text + 1) % SLOTS;
		arg.value = slots[arg.slot];
		return arg;
	}
	if (*text == 'a' && text[1] >= '0' && text[1] <= '9') {
		arg.value = atoi(text + 1) % ADDRESSES;
		return arg;
	}
	arg.value = strtol(text, &end, 0);
	if (!*end)
		return arg;
	for (char *name = strtok_r(text, "|", &rest); name;
	     name = strtok_r(NULL, "|", &rest)) {
		size_t at = 0;

		while (at < sizeof(names) / sizeof(*names) &&
		       strcmp(names[at].name, name))
			at++;
		if (at == sizeof(names) / sizeof(*names)) {
			print(" (what is %s?)", name);
			continue;
		}
		arg.value |= names[at].value;
	}
	return arg;
}

/* ACTOR CALL ARGUMENT... */
bool parse(char *line, struct step *step)
{
	char *rest, *actor = strtok_r(line, " \n", &rest), *word;

	*step = (struct step){ .name = strtok_r(NULL, " \n", &rest) };
	if (!step->name)
		return false;
	step->actor = atoi(actor) % ACTORS;
	while (step->args < ARGUMENTS && (word = strtok_r(NULL, " \n", &rest)))
		step->arg[step->args++] = value_of(word);
	return true;
}

/* The kernel selects ports: the first one that a step uses is p1. */
uint32_t port_number(in_port_t port)
{
	uint32_t at = 1;

	if (!port)
		return 0;
	while (at < shared->ports && shared->port[at] != port)
		at++;
	if (at >= shared->ports && at < PORTS)
		shared->port[at] = port, shared->ports = at + 1;
	return at % PORTS;
}

void print_address(const struct sockaddr_storage *addr, socklen_t len)
{
	const struct sockaddr_in *in = (const void *)addr;
	const struct sockaddr_in6 *in6 = (const void *)addr;
	char text[INET6_ADDRSTRLEN] = "?";

	if (addr->ss_family == AF_INET)
		inet_ntop(AF_INET, &in->sin_addr, text, sizeof(text));
	else if (addr->ss_family == AF_INET6)
		inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof(text));
	if (*text == '?')
		print(" family %u of %u", addr->ss_family, len);
	else
		print(" %s p%u of %u", text, port_number(in->sin_port), len);
}
