/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Descriptors whose close takes long, and a launcher without free ones. */
#include "hostile.h"

/*
 * Opens a TCP socket with data that its peer never acknowledges: closing its
 * last descriptor takes an hour.
 */
static int slow_closing_tcp(void)
{
	static const char data[65536];
	struct linger slow = { .l_onoff = 1, .l_linger = 3600 };
	struct sockaddr_in at = { .sin_family = AF_INET };
	socklen_t len = sizeof(at);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(listener, (void *)&at, sizeof(at)) || listen(listener, 1) ||
	    getsockname(listener, (void *)&at, &len) ||
	    connect(fd, (void *)&at, sizeof(at)) ||
	    accept(listener, NULL, NULL) < 0)
		err(1, "TCP");
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &slow, sizeof(slow));
	while (send(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
	return fd;
}

/*
 * Sends the last descriptor of a socket behind `count` other messages, and
 * closes the connection. The launcher is stopped.
 */
static void send_slow_closing(int count, uint32_t *words)
{
	int end = connect_launcher(), fd = slow_closing_tcp();
	pid_t pid;

	while (count--)
		send_message(end, MLL_OPEN, NULL, NULL, 0);
	send_message(end, MLL_REQUEST, words, &fd, 1);
	/* A killed process does not wait for its descriptors to be closed. */
	pid = fork();
	if (!pid)
		for (;;)
			pause();
	close(fd);
	close(end);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

/* A process that sends such descriptors when told, and ends with the server. */
struct slow_closer {
	int user, knows_secret, go[2], done[2];
	pid_t pid;
};

static void start_slow_closer(struct slow_closer *slow_closer)
{
	struct pollfd all[2] = { { .events = POLLIN }, { .events = POLLIN } };
	uint32_t words[4];

	if (pipe(slow_closer->go) || pipe(slow_closer->done))
		err(1, "pipe");
	all[0].fd = syscall(SYS_pidfd_open, server, 0);
	all[1].fd = slow_closer->go[0];
	fflush(stdout);
	slow_closer->pid = fork();
	if (slow_closer->pid)
		return;
	if (setresuid(slow_closer->user, slow_closer->user, slow_closer->user))
		err(1, "setresuid");
	secret(words);
	words[3] ^= !slow_closer->knows_secret;
	poll(all, 2, -1);
	if (!all[0].revents) {
		send_slow_closing(0, words);
		send_slow_closing(1, words);
		if (write(slow_closer->done[1], "", 1) == 1)
			poll(all, 1, -1);
	}
	_exit(0);
}

static pid_t find_launcher(void)
{
	char path[32];
	pid_t launcher = 0;
	FILE *status;

	sprintf(path, "/proc/%d/stat", server);
	status = fopen(path, "r");
	if (!status || fscanf(status, "%*d (%*[^)]) %*c %d", &launcher) != 1)
		err(1, "%s", path);
	fclose(status);
	return launcher;
}

static void send_slow_fd(struct slow_closer *slow_closer)
{
	pid_t launcher = find_launcher();
	char byte;

	/* Everything is sent before any of it is received. */
	kill(launcher, SIGSTOP);
	usleep(100000);
	if (write(slow_closer->go[1], "", 1) != 1 ||
	    read(slow_closer->done[0], &byte, 1) != 1)
		errx(1, "no datagram was sent");
	kill(launcher, SIGCONT);
}

static void lease_beside(void *other_users)
{
	struct slow_closer *both = other_users;
	struct lease lease;

	request_lease(&lease, "before", open_udp(ip, 0));
	send_command(&lease, "open", MLL_OPEN);
	send_slow_fd(both);
	send_slow_fd(both + 1);
	send_command(&lease, "close", MLL_CLOSE);
}

/* The launcher's closes take long. */
void test_slow_closes(void)
{
	static int root, other = 65534;
	static struct slow_closer other_users[] = { { 65533, 0 },
						    { 65533, 1 } },
				  second = { 65534, 1 };

	/* Before there are queues, which they would keep. */
	start_slow_closer(other_users);
	start_slow_closer(other_users + 1);
	start_slow_closer(&second);
	run_in_child(request_as_user, &other);
	run_in_child(lease_beside, other_users);
	run_in_child(request_as_user, &other);
	send_slow_fd(&second);
	run_in_child(request_as_user, &root);
}

/*
 * Connects and sends a descriptor each time, until the launcher has accepted no
 * connection for a second.
 */
static int connect_until_full(void)
{
	int i, end, tries = 0, null = open("/dev/null", O_RDONLY);

	for (i = 0; i < 10000; i++) {
		end = try_connect_launcher(SOCK_NONBLOCK);
		if (end >= 0) {
			send_message(end, MLL_OPEN, NULL, &null, 1);
			close(end);
			tries = 0;
		} else if (errno != EAGAIN) {
			err(1, "connect");
		} else if (++tries == 100) {
			return 1;
		} else {
			usleep(10000);
		}
	}
	return 0;
}

static int count_descriptors(pid_t pid)
{
	struct dirent *entry;
	int count = 0;
	char path[32];
	DIR *all;

	sprintf(path, "/proc/%d/fd", pid);
	all = opendir(path);
	while (all && (entry = readdir(all)))
		count += entry->d_name[0] != '.';
	if (all)
		closedir(all);
	return count;
}

/*
 * Strangers have made as many connections as the launcher accepts, from two
 * processes, when a socket is closed: they wait behind a descriptor that cannot
 * be closed.
 */
void test_full_launcher(void)
{
	static struct slow_closer stranger = { 65533, 0 };
	struct rlimit before, few = { .rlim_cur = 256 };
	struct mll_message message;
	struct lease lease;
	pid_t other;
	int fd;

	start_slow_closer(&stranger);
	fd = open_udp(ip, 0);
	request_lease(&lease, "before", fd);
	send_command(&lease, "open", MLL_OPEN);
	marker = "while it is open";
	printf("frames: %s\n", yes_or_no(send_until(arrived, &lease, marker)));
	fflush(stdout);
	if (prlimit(find_launcher(), RLIMIT_NOFILE, NULL, &before))
		err(1, "prlimit");
	few.rlim_max = before.rlim_max;
	if (prlimit(find_launcher(), RLIMIT_NOFILE, &few, NULL))
		err(1, "prlimit");
	send_slow_fd(&stranger);
	other = fork();
	if (!other)
		_exit(connect_until_full());
	printf("connected until nobody accepts: %s\n",
	       yes_or_no(connect_until_full()));
	waitpid(other, NULL, 0);
	printf("half of the descriptors are free: %s\n",
	       yes_or_no(count_descriptors(find_launcher()) < 128));
	fflush(stdout);
	close(fd);
	serves("the next socket", open_udp(ip, 0));
	print_message("the lease", receive_message(lease.end, &message, NULL),
		      &message);
	/* With its peer, the descriptor can be closed. */
	kill(stranger.pid, SIGKILL);
	waitpid(stranger.pid, NULL, 0);
	prlimit(find_launcher(), RLIMIT_NOFILE, &before, NULL);
}
