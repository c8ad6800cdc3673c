// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * What programs do to descriptors that they do not know, before they start another one: the report's is one of those.
 *
 *   report kept     all descriptors are closed by the C library, and the report's path leads nowhere
 *   report closed   all descriptors are closed behind the library's back
 *   report taken    the program has a use for the number itself, and starts itself again
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

static int number(void)
{
	const char *path = getenv("MANYLANE_REPORT");

	return path ? atoi(strrchr(path, '/') + 1) : -1;
}

/* What a program sees that asks whether a descriptor is open. */
static const char *seen(int fd)
{
	if (fcntl(fd, F_GETFD) >= 0)
		return "open";
	return errno == EBADF ? "no descriptor" : "strange";
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	char path[64];
	int fd = number();

	if (!strcmp(what, "end")) {
		printf("%s\n", seen(fd));
		return 0;
	}
	if (!strcmp(what, "kept")) {
		for (int each = 3; each < 2000; each++)
			close(each);
		closefrom(3);
		snprintf(path, sizeof(path), "/nowhere/fd/%d", fd);
		setenv("MANYLANE_REPORT", path, 1);
	} else if (!strcmp(what, "closed")) {
		for (int each = 3; each < 2000; each++)
			syscall(SYS_close, each);
	} else if (!strcmp(what, "taken")) {
		if (dup2(1, fd) != fd)
			return 1;
	}
	printf("%s, then ", seen(fd));
	fflush(stdout);
	execl(argv[0], argv[0], "end", NULL);
	return 1;
}
