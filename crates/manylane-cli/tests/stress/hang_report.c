/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Reports what the program did when it failed: for each thread of each process
 * of the group, the call that it is in, inside and outside of the kernel; and
 * kernel sockets with datagrams that no thread receives. A thread that is stuck
 * shows the same a second later; one that got no CPU shows how long it waited
 * for one.
 */
#include "stress.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAPS 64
#define WORDS 512
#define SHOWN 24

/* A mapping with code, and the start of its file's first mapping. */
struct map {
	unsigned long start, end, base;
	char name[64];
};

/* Reads a file of /proc without stdio: "" if it cannot be read. */
static const char *read_text(char *text, size_t room, const char *format, ...)
{
	char path[300];
	va_list list;
	ssize_t got;
	size_t len = 0;
	int fd;

	va_start(list, format);
	vsnprintf(path, sizeof(path), format, list);
	va_end(list);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	while (fd >= 0 && len < room - 1) {
		got = read(fd, text + len, room - 1 - len);
		if (got <= 0)
			break;
		len += (size_t)got;
	}
	if (fd >= 0)
		close(fd);
	text[len] = 0;
	while (len && text[len - 1] == '\n')
		text[--len] = 0;
	return text;
}

static int read_maps(int pid, struct map *maps)
{
	static char text[1 << 18];
	char *rest, *line, file[256], base_file[256] = "";
	unsigned long base = 0;
	int count = 0;

	read_text(text, sizeof(text), "/proc/%d/maps", pid);
	for (line = strtok_r(text, "\n", &rest); line;
	     line = strtok_r(NULL, "\n", &rest)) {
		unsigned long start, end;
		char mode[8];

		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %255s", &start, &end,
			   mode, file) != 4)
			continue;
		if (strcmp(file, base_file)) {
			strcpy(base_file, file);
			base = start;
		}
		if (mode[2] != 'x' || count == MAPS)
			continue;
		const char *name = strrchr(file, '/');

		maps[count] = (struct map){ start, end, base, "" };
		snprintf(maps[count].name, sizeof(maps[count].name), "%.60s",
			 name ? name + 1 : file);
		count++;
	}
	return count;
}

static bool print_place(unsigned long word, const struct map *maps, int count)
{
	for (int at = 0; at < count; at++) {
		if (word < maps[at].start || word >= maps[at].end)
			continue;
		fprintf(stderr, " %s+0x%lx", maps[at].name,
			word - maps[at].base);
		return true;
	}
	return false;
}

/*
 * Prints words of the thread's stack that may be return addresses, the latest
 * first.
 */
static void print_callers(int pid, const char *call, const struct map *maps,
			  int count)
{
	unsigned long words[WORDS], sp, pc;
	const char *last = strrchr(call, ' ');
	char path[64];
	int fd, shown = 0;

	if (!last || sscanf(last, "%lx", &pc) != 1)
		return;
	while (last > call && *--last != ' ')
		;
	if (sscanf(last, "%lx", &sp) != 1)
		return;
	fprintf(stderr, "stress:     at");
	print_place(pc, maps, count);
	snprintf(path, sizeof(path), "/proc/%d/mem", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? -1 : pread(fd, words, sizeof(words), (off_t)sp);

	for (size_t at = 0;
	     got > 0 && at < (size_t)got / sizeof(words[0]) && shown < SHOWN;
	     at++)
		shown += print_place(words[at], maps, count);
	if (fd >= 0)
		close(fd);
	fprintf(stderr, "\n");
}

static void print_thread(int pid, int tid, const struct map *maps, int count,
			 bool again)
{
	char call[256], place[64], state[4096], times[128], stack[4096];
	char *rest, *line;

	read_text(call, sizeof(call), "/proc/%d/task/%d/syscall", pid, tid);
	read_text(place, sizeof(place), "/proc/%d/task/%d/wchan", pid, tid);
	read_text(times, sizeof(times), "/proc/%d/task/%d/schedstat", pid, tid);
	read_text(state, sizeof(state), "/proc/%d/task/%d/status", pid, tid);
	line = strstr(state, "State:");
	fprintf(stderr,
		"stress:   thread %d: %c, in %s, ran/waited/times %s, call %s\n",
		tid, line ? line[7] : '?', place, times, call);
	if (again)
		return;
	read_text(stack, sizeof(stack), "/proc/%d/task/%d/stack", pid, tid);
	if (*stack)
		fprintf(stderr, "stress:     kernel");
	for (line = strtok_r(stack, "\n", &rest); line;
	     line = strtok_r(NULL, "\n", &rest))
		fprintf(stderr, " %s", line + strcspn(line, " ") + 1);
	if (*stack)
		fprintf(stderr, "\n");
	print_callers(pid, call, maps, count);
}

/* Calls `tell` for each entry of a folder whose name is a number. */
static void for_each_number(const char *path,
			    void (*tell)(int number, void *with), void *with)
{
	DIR *folder = opendir(path);
	struct dirent *entry;

	while (folder && (entry = readdir(folder))) {
		if (isdigit((unsigned char)entry->d_name[0]))
			tell(atoi(entry->d_name), with);
	}
	if (folder)
		closedir(folder);
}

struct process {
	int pid, maps;
	bool again;
	unsigned long inode;
	struct map map[MAPS];
};

static void print_one_thread(int tid, void *with)
{
	struct process *process = with;

	print_thread(process->pid, tid, process->map, process->maps,
		     process->again);
}

static bool is_in_group(int pid)
{
	char text[512];
	const char *behind;
	int group = 0;

	read_text(text, sizeof(text), "/proc/%d/stat", pid);
	behind = strrchr(text, ')');
	return behind && sscanf(behind, ") %*c %*d %d", &group) == 1 &&
	       group == getpgrp();
}

static void print_process(int pid, void *with)
{
	static struct process process;
	char path[64], word[64];

	if (!is_in_group(pid))
		return;
	process.pid = pid;
	process.again = *(bool *)with;
	process.maps = process.again ? 0 : read_maps(pid, process.map);
	fprintf(stderr, "stress: process %d (%s):\n", pid,
		read_text(word, sizeof(word), "/proc/%d/comm", pid));
	snprintf(path, sizeof(path), "/proc/%d/task", pid);
	for_each_number(path, print_one_thread, &process);
}

static void print_descriptor(int fd, void *with)
{
	struct process *process = with;
	char path[64], to[64], wanted[64];

	snprintf(path, sizeof(path), "/proc/%d/fd/%d", process->pid, fd);
	snprintf(wanted, sizeof(wanted), "socket:[%lu]", process->inode);
	ssize_t len = readlink(path, to, sizeof(to) - 1);

	to[len < 0 ? 0 : len] = 0;
	if (!strcmp(to, wanted))
		fprintf(stderr, " %d/%d", process->pid, fd);
}

static void print_holder(int pid, void *with)
{
	struct process process = { .pid = pid,
				   .inode = *(unsigned long *)with };
	char path[64];

	if (!is_in_group(pid))
		return;
	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	for_each_number(path, print_descriptor, &process);
}

/* Prints kernel sockets with datagrams, and their owners. */
static void print_queues(void)
{
	static char text[1 << 18];
	char *rest, *line;

	read_text(text, sizeof(text), "/proc/self/net/udp");
	for (line = strtok_r(text, "\n", &rest); line;
	     line = strtok_r(NULL, "\n", &rest)) {
		unsigned int port, bytes;
		unsigned long inode;

		if (sscanf(line,
			   " %*d: %*x:%x %*s %*s %*x:%x %*s %*s %*s %*s %lu",
			   &port, &bytes, &inode) != 3 ||
		    !bytes)
			continue;
		fprintf(stderr,
			"stress: a socket of port %u holds %u bytes (process/descriptor:",
			port, bytes);
		for_each_number("/proc", print_holder, &inode);
		fprintf(stderr, ")\n");
	}
}

/* The bytes that all sockets of this machine on a port hold. */
uint32_t queued_bytes(in_port_t wanted)
{
	static _Thread_local char text[1 << 16];
	char *rest, *line;
	uint32_t sum = 0;

	read_text(text, sizeof(text), "/proc/self/net/udp");
	for (line = strtok_r(text, "\n", &rest); line;
	     line = strtok_r(NULL, "\n", &rest)) {
		unsigned int port, bytes;

		if (sscanf(line, " %*d: %*x:%x %*s %*s %*x:%x", &port,
			   &bytes) == 2 &&
		    port == ntohs(wanted))
			sum += bytes;
	}
	return sum;
}

void report_all(void)
{
	bool again = false;

	for (int at = 0; at < SOCKETS; at++)
		fprintf(stderr,
			"stress: socket %d (way %d, port %u): %u sent, %u received\n",
			at, shared->socket[at].way,
			ntohs(shared->socket[at].addr.sin_port),
			shared->socket[at].sent, shared->socket[at].received);
	print_queues();
	for_each_number("/proc", print_process, &again);
	sleep(1);
	fprintf(stderr, "stress: a second later\n");
	again = true;
	print_queues();
	for_each_number("/proc", print_process, &again);
}
