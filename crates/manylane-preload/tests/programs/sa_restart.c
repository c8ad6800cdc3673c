/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Does a handler interrupt a receive? That depends on how it was installed:
 *
 *	sa_restart HOW
 *
 * Two threads receive until the library has seen each return often. Then one of
 * them is sent signals until one has interrupted the receive, or until the
 * handler has run several times and the receive still waits.
 */
#define _GNU_SOURCE
#include "warm_up.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#define SIGNALS_MAX 10

static _Atomic unsigned handled, interrupted;

sighandler_t bsd_signal(int signal, sighandler_t handler);

static void handle(int signal)
{
	(void)signal;
	handled++;
}

static void *worker(void *arg)
{
	unsigned nth = (unsigned)(unsigned long)arg;
	char byte = 0;

	while (byte != 'e') {
		if (recv(server, &byte, 1, 0) < 0) {
			interrupted += errno == EINTR;
			continue;
		}
		count_received(nth);
	}
	return NULL;
}

static void install(const char *how)
{
	if (!strcmp(how, "signal")) {
		signal(SIGUSR1, handle);
	} else if (!strcmp(how, "bsd_signal")) {
		bsd_signal(SIGUSR1, handle);
	} else if (!strcmp(how, "ssignal")) {
		ssignal(SIGUSR1, handle);
	} else if (!strcmp(how, "siginterrupt")) {
		signal(SIGUSR1, handle);
		siginterrupt(SIGUSR1, 1);
	} else if (!strcmp(how, "siginterrupt ahead")) {
		siginterrupt(SIGUSR1, 1);
		signal(SIGUSR1, handle);
	} else if (!strcmp(how, "siginterrupt off")) {
		struct sigaction action = { .sa_handler = handle };

		sigaction(SIGUSR1, &action, NULL);
		siginterrupt(SIGUSR1, 0);
	} else if (!strcmp(how, "sigset")) {
		sigset(SIGUSR1, handle);
	} else if (!strcmp(how, "sysv_signal")) {
		/* It is installed for one signal only. */
		sysv_signal(SIGUSR1, handle);
	} else if (!strcmp(how, "sigignore")) {
		signal(SIGUSR1, handle);
		sigset(SIGUSR2, handle);
		sigignore(SIGUSR2);
	} else {
		/*
		 * As signal(), whose handlers interrupt under ThreadSanitizer.
		 */
		ssignal(SIGUSR1, handle);
		signal(SIGUSR2, handle);
		siginterrupt(SIGUSR2, 1);
	}
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	/* No process outlives the test. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(300);
	server = loopback_server(0, &address);
	open_clients();
	install(argv[1]);
	start_and_warm_up();
	/*
	 * By now it waits again. A handler that runs earlier makes it try once
	 * more.
	 */
	usleep(50000);
	for (unsigned n = 1; n <= SIGNALS_MAX && !interrupted; n++) {
		if (n > 1 && !strcmp(argv[1], "sysv_signal"))
			sysv_signal(SIGUSR1, handle);
		pthread_kill(workers[0], SIGUSR1);
		while (handled < n)
			usleep(50);
		usleep(2000);
	}
	printf("%s: %s\n", argv[1],
	       interrupted ? "interrupted" : "goes on after it");
	/* All datagrams still arrive. */
	for (int n = 0; n < 100; n++)
		send_all_and_wait('x');
	fflush(stdout);
	_exit(0);
}
