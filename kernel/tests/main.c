// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests of manylane.ko: module-test [ONLY], or module-test stress SECONDS SEED.
 * Each test has a process of its own, and a line: PASS, FAIL or SKIP, as guest.sh and
 * those that start it read them. Needs root, and loopback that is up.
 */
#include <signal.h>

#include "test.h"

static int failed;

static int module_users(void)
{
	FILE *file = fopen("/sys/module/manylane/refcnt", "r");
	int users = -1;

	if (file) {
		if (fscanf(file, "%d", &users) != 1)
			users = -1;
		fclose(file);
	}
	return users;
}

/* Sockets that were closed hold the module until their last reference is gone. */
static int await_no_users(void)
{
	double end = now() + 10;

	while (module_users() && now() < end)
		usleep(5000);
	return module_users();
}

static void run(const struct test *test)
{
	int status;
	pid_t child;

	fflush(stdout);
	child = fork();
	if (!child) {
		/* Ends a test that waits for a datagram that was lost. */
		alarm(120);
		test->run();
		fflush(stdout);
		_exit(0);
	}
	waitpid(child, &status, 0);
	if (!status && await_no_users()) {
		printf("%d users of the module are left\n", module_users());
		status = 1;
	}
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
		printf("SKIP %s\n", test->name);
		return;
	}
	printf("%s %s\n", status ? "FAIL" : "PASS", test->name);
	failed += !!status;
}

int main(int argc, char **argv)
{
	const struct test *all[] = { queue_tests, call_tests, message_tests,
				     header_tests, fault_tests };
	const char *only = argc > 1 ? argv[1] : "";
	unsigned int i;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 4 && !strcmp(only, "stress")) {
		stress(atoi(argv[2]), atoi(argv[3]));
		if (await_no_users())
			fail("%d users of the module are left", module_users());
		return 0;
	}
	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		const struct test *test;

		for (test = all[i]; test->name; test++)
			if (strstr(test->name, only))
				run(test);
	}
	return failed ? 1 : 0;
}
