/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A hostile program that leases queues: hostile WHAT ADDRESS PEERS. It talks to
 * the launcher directly, without the library, and prints what it gets. PEERS is
 * the network namespace that datagrams come from.
 */
#include "hostile.h"

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = { { "invalid", test_invalid_messages },
		    { "commands", test_invalid_commands },
		    { "closed", test_closed_socket },
		    { "partial", test_partial_sockets },
		    { "kept", test_kept_queues },
		    { "corrupt", test_corrupt_memory },
		    { "users", test_users },
		    { "slow", test_slow_closes },
		    { "flood", flood_connections },
		    { "full", test_full_launcher },
		    { "queries", flood_requests },
		    { "producers", test_moving_producers },
		    { "stopped", test_stopped_child } };
	int ours = open("/proc/self/ns/net", O_RDONLY), theirs;
	unsigned int i;

	if (argc != 4)
		errx(2, "hostile WHAT ADDRESS PEERS");
	ip = argv[2];
	server = getppid();
	theirs = open(argv[3], O_RDONLY);
	if (setns(theirs, CLONE_NEWNET))
		err(1, "setns");
	peer = socket(AF_INET, SOCK_DGRAM, 0);
	if (setns(ours, CLONE_NEWNET))
		err(1, "setns");
	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (!strcmp(argv[1], all[i].name))
			all[i].run();
	return 0;
}
