// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * What programs do to descriptors that they do not know before they start
 * another program. The report's descriptor is one of those.
 *
 *	report_fd closefrom	the C library closes all descriptors, and the report's path
 *			leads nowhere
 *	report_fd closed	all descriptors are closed, unseen by the library
 *	report_fd reused	the program uses the number itself, and starts itself again
 *
 * The program that is started prints what it finds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int report_number(void)
{
	const char *path = getenv("MANYLANE_REPORT");

	return path ? atoi(strrchr(path, '/') + 1) : -1;
}

/* Describes a descriptor as a program sees it. */
static const char *describe(int fd)
{
	if (fcntl(fd, F_GETFD) >= 0)
		return "open";
	return errno == EBADF ? "no descriptor" : "unexpected errno";
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	char path[64];
	int fd = report_number();

	if (!strcmp(what, "end")) {
		printf("%s\n", describe(fd));
		return 0;
	}
	if (!strcmp(what, "closefrom")) {
		for (int each = 3; each < 2000; each++)
			close(each);
		closefrom(3);
		snprintf(path, sizeof(path), "/nowhere/fd/%d", fd);
		setenv("MANYLANE_REPORT", path, 1);
	} else if (!strcmp(what, "closed")) {
		for (int each = 3; each < 2000; each++)
			syscall(SYS_close, each);
	} else if (!strcmp(what, "reused")) {
		if (dup2(1, fd) != fd)
			return 1;
	}
	printf("%s, then ", describe(fd));
	fflush(stdout);
	execl(argv[0], argv[0], "end", NULL);
	return 1;
}
