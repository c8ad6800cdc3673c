/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A server that prints what the library does in it: nothing, if the kernel
 * started it in secure-execution mode (set-user-ID). Two threads receive on a
 * socket until it has lanes, if there are any.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

static void *worker(void *nth)
{
	receive_all((unsigned)(unsigned long)nth);
	return NULL;
}

/* Descriptors that the kernel has and fcntl(2) denies. */
static int has_hidden(void)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *at;
	int found = 0;

	while (dir && (at = readdir(dir)))
		found |= at->d_name[0] != '.' &&
			 fcntl(atoi(at->d_name), F_GETFD) < 0;
	closedir(dir);
	return found;
}

static int is_mapped(const char *name)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[4096];
	int found = 0;

	while (maps && fgets(line, sizeof(line), maps))
		found |= !!strstr(line, name);
	fclose(maps);
	return found;
}

int main(void)
{
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(300);
	server = loopback_server(0, &address);
	open_clients();
	start_and_warm_up();
	printf("secure %d, library %d, report %d, hidden descriptors %d\n",
	       !!getauxval(AT_SECURE), is_mapped("libmanylane_preload.so"),
	       is_mapped("memfd:manylane-report"), has_hidden());
	for (int rounds = 0; rounds < 100; rounds++)
		send_all('e');
	for (int i = 0; i < WORKERS; i++)
		pthread_join(workers[i], NULL);
	return 0;
}
