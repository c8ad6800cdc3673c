/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Closes during which a filter of system calls comes into force:
 *
 *	seccomp_close_race close|range|fclose
 *
 * A thread opens and closes sockets, by syscall(2) or fclose(3), while another
 * one installs the filter for all threads. It allows the program's own calls;
 * any other kills the process. Prints how many of the processes were killed.
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "loopback.h"

#define PROCESSES 60
/* Enough that most filters come into force while they are being closed. */
#define FILES 128

static const char *test_case;
static FILE *files[FILES];
/* The thread makes no more calls of its start. */
static _Atomic int started;

static void *closer(void *arg)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	void *volatile first;

	any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	/* The C library maps memory for what a thread frees first. */
	first = malloc(1);
	free(first);
	started = 1;
	for (int i = 0; !strcmp(test_case, "fclose") && i < FILES; i++)
		if (files[i])
			fclose(files[i]);
	for (;;) {
		int fd = socket(AF_INET, SOCK_DGRAM, 0);

		bind(fd, (void *)&any, sizeof(any));
		if (!strcmp(test_case, "range"))
			syscall(SYS_close_range, fd, fd, 0);
		else
			syscall(SYS_close, fd);
	}
	return arg;
}

static void confine(void)
{
	static const int calls[] = {
		SYS_socket,	 SYS_bind,  SYS_close,
		SYS_close_range, SYS_futex, SYS_clock_nanosleep,
		SYS_exit_group,	 SYS_brk,   SYS_madvise,
		SYS_munmap,
	};
	struct sock_filter code[32] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, nr)),
	};
	struct sock_fprog program = { .filter = code };
	int at = 1;

	for (unsigned i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
		code[at++] = (struct sock_filter)BPF_JUMP(
			BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
		code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
							  SECCOMP_RET_ALLOW);
	}
	code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
						  SECCOMP_RET_KILL_PROCESS);
	program.len = at;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
		    SECCOMP_FILTER_FLAG_TSYNC, &program))
		_exit(2);
}

static void run(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET };
	pthread_t thread;

	any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int i = 0; !strcmp(test_case, "fclose") && i < FILES; i++) {
		int fd = socket(AF_INET, SOCK_DGRAM, 0);

		if (fd < 0)
			break;
		bind(fd, (void *)&any, sizeof(any));
		files[i] = fdopen(fd, "r");
	}
	pthread_create(&thread, NULL, closer, NULL);
	while (!started)
		usleep(100);
	usleep(100);
	confine();
	usleep(2000);
	_exit(0);
}

int main(int argc, char **argv)
{
	int killed = 0, status;

	if (argc != 2)
		return 2;
	test_case = argv[1];
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int i = 0; i < PROCESSES; i++) {
		pid_t child = fork();

		if (!child)
			run();
		if (waitpid(child, &status, 0) != child)
			return 3;
		if (WIFEXITED(status) && WEXITSTATUS(status))
			return 4;
		killed += WIFSIGNALED(status);
	}
	printf("%d killed\n", killed);
	return 0;
}
