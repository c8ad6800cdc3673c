// SPDX-License-Identifier: GPL-2.0-only
/*
 * Allocations of the kernel that fail, one after the other, in each request: it
 * fails or succeeds, and leaves nothing behind. On kernels with failslab.
 */
#define _GNU_SOURCE
#include <sys/uio.h>

#include "test.h"

static void set(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		skip("no %s", path);
	close(fd);
}

static int open_fail_nth(void)
{
	int fd = open("/proc/thread-self/fail-nth", O_RDWR);

	if (fd < 0)
		skip("no fail-nth");
	set("/sys/kernel/debug/failslab/ignore-gfp-wait", "N");
	/* They are expected, and no complaints. */
	set("/sys/kernel/debug/failslab/verbose", "0");
	return fd;
}

/* Makes the Nth allocation of this thread fail; 0: none. False if the last one is still to come. */
static int fail_nth(int control, int n)
{
	char text[16] = "", next[16];

	is(pread(control, text, sizeof(text) - 1, 0) > 0, 1);
	snprintf(next, sizeof(next), "%d", n);
	is(write(control, next, strlen(next)), strlen(next));
	return atoi(text) == 0;
}

static void attach_fails(void)
{
	int n, failed = 0, control = open_fail_nth();
	struct manylane_attach args = { .version = MANYLANE_VERSION,
					.queues = 3 };
	int device = open(MANYLANE_DEVICE, O_RDWR);

	for (n = 1; n < 500; n++) {
		int fd = bound(n % 2 ? AF_INET : AF_INET6, NULL),
		    from = sender_to(fd), result, error, reached;

		args.fd = fd;
		fail_nth(control, n);
		result = ioctl(device, MANYLANE_ATTACH, &args);
		error = errno;
		reached = fail_nth(control, 0);
		if (result < 0) {
			/* The latter of a socket's inode. */
			if (error != ENOMEM && error != ENFILE)
				fail("attaching failed with %s",
				     strerror(error));
			failed++;
			/* As before. */
			is(attach(fd, MANYLANE_ROUND_ROBIN, 3), 3);
		} else {
			is(result, 3);
		}
		send_numbers(from, 0, 3);
		await_arrived(fd, 3);
		is(drain(fd, NULL, 0), 3);
		close(from);
		close(fd);
		if (!reached)
			break;
	}
	/* Three sockets, and more. */
	if (failed < 6 || n == 500)
		fail("%d of %d attempts failed", failed, n);
}

static void register_fails(void)
{
	struct iovec iov[2] = {};
	struct mmsghdr headers[4] = {};
	struct manylane_result results[4];
	struct manylane_register args = { .version = MANYLANE_VERSION,
					  .count = 4,
					  .headers = (uintptr_t)headers,
					  .results = (uintptr_t)results };
	int fd = attached(AF_INET, 0, 2), n, i, failed = 0, reached = 1,
	    control;

	control = open_fail_nth();
	for (i = 0; i < 4; i++) {
		headers[i].msg_hdr.msg_iov = iov;
		headers[i].msg_hdr.msg_iovlen = 2;
	}
	for (n = 1; n < 50 && reached; n++) {
		int result, error;

		fail_nth(control, n);
		result = ioctl(fd, MANYLANE_REGISTER, &args);
		error = errno;
		reached = fail_nth(control, 0);
		if (result) {
			is(error, ENOMEM);
			failed++;
		}
	}
	/* The array, and that of the segments of each header. */
	is(failed, 5);
}

const struct test fault_tests[] = {
	{ "attaching, with allocations that fail", attach_fails },
	{ "registering, with allocations that fail", register_fails },
	{},
};
