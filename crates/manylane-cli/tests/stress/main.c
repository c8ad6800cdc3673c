/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * stress SECONDS [SEED]: 8 threads and 3 forked children make random calls on
 * UDP sockets, shared ones and their own, while two threads send. From time to
 * time, the senders and some of the receivers pause: the others have to receive
 * all that is queued. The seed determines the choices, but not the order in
 * which threads run. Exits with 0, or with 1 and the error.
 */
#include "stress.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/*
 * Milliseconds for receiving all that is queued, with a margin. One receiver
 * needs at most 20 for each socket. If a socket falls back meanwhile, a grace
 * period of the kernel is added, which takes seconds if other programs keep all
 * CPUs busy. A thread has been seen to get no CPU time for 40 s. Counted in
 * sleeps, because a machine may stall.
 */
#define DRAIN_TIMEOUT_MS 100000

struct shared *shared;
static uint32_t longest, rounds;
static pid_t children[CHILDREN];

/* splitmix64 */
static uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

uint32_t draw(struct actor *actor, uint32_t below)
{
	return below ? (uint32_t)(next_random(&actor->random) >> 33) % below :
		       0;
}

static struct actor actor_of(uint32_t number, uint32_t life)
{
	struct actor actor = { .number = number,
			       .random = shared->seed ^
					 ((uint64_t)number << 32 | life) };

	for (int at = 0; at < SOCKETS; at++)
		actor.epoll[at] = -1;
	next_random(&actor.random);
	actor.favourite = draw(&actor, SOCKETS);
	return actor;
}

void fail(const char *format, ...)
{
	char text[512];
	va_list list;
	int saved = errno;

	va_start(list, format);
	errno = saved;
	vsnprintf(text, sizeof(text), format, list);
	va_end(list);
	if (!shared->failures++)
		fprintf(stderr, "stress: %s\nstress: process %d, seed %llu\n",
			text, getpid(), (unsigned long long)shared->seed);
	/* At once: output after a failure is meaningless. */
	kill(0, SIGKILL);
	_exit(1);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static int count_descriptors(void)
{
	DIR *folder = opendir("/proc/self/fd");
	int count = 0;

	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

/* Runs an actor until the end, or for `turns` rounds; false at the end. */
static bool run_actor(struct actor *actor, uint32_t turns)
{
	uint32_t bit = 1u << actor->number;

	shared->process[actor->number] = (uint32_t)getpid();
	shared->thread[actor->number] = (uint32_t)gettid();
	while (!shared->stop) {
		if (!(shared->receiving & bit)) {
			shared->idle |= bit;
			while (!(shared->receiving & bit) && !shared->stop)
				usleep(500);
			shared->idle &= ~bit;
			continue;
		}
		if (!turns--)
			return true;
		if (draw(actor, 200))
			receive_shared(actor);
		else
			use_private(actor);
		shared->line[actor->number] = 0;
	}
	return false;
}

/* Threads that end, and are replaced by others. */
static void *restart_threads(void *argument)
{
	struct actor actor = actor_of((uint32_t)(uintptr_t)argument >> 16,
				      (uint32_t)(uintptr_t)argument & 0xffff);
	uint32_t turns =
		draw(&actor, 3) ? 200 + draw(&actor, 2000) : draw(&actor, 20);

	if (!run_actor(&actor, turns)) {
		end_actor(&actor);
		return NULL;
	}
	end_actor(&actor);
	return &children;
}

static void *run_forever(void *number)
{
	for (uint32_t life = 1;; life++) {
		pthread_t thread;
		void *more;

		CHECK(!pthread_create(&thread, NULL, restart_threads,
				      (void *)((uintptr_t)number << 16 |
					       (life & 0xffff))),
		      "pthread_create");
		pthread_join(thread, &more);
		if (!more)
			return NULL;
	}
}

static void *send_all(void *number)
{
	struct actor actor =
		actor_of(RECEIVERS + (uint32_t)(uintptr_t)number, 0);
	int flows[FLOWS];

	for (int at = 0; at < FLOWS; at++)
		flows[at] = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	while (!shared->stop) {
		if (shared->quiet)
			usleep(1000);
		else
			send_shared(&actor, flows);
		receive_answers(flows);
	}
	for (int at = 0; at < FLOWS; at++)
		close(flows[at]);
	return NULL;
}

/* True if all datagrams were received, and all replies are back. */
static bool is_settled(void)
{
	for (int at = 0; at < SOCKETS; at++) {
		if (shared->socket[at].sent != shared->socket[at].received)
			return false;
	}
	return shared->replies == shared->replies_received;
}

/* Pauses the senders and some receivers: the others receive everything. */
static void drain_and_check(struct actor *actor)
{
	uint32_t everybody = (1u << RECEIVERS) - 1, some = 0;
	uint32_t turns = 0, before[RECEIVERS];

	for (int at = 0; at < RECEIVERS; at++)
		before[at] = shared->polls[at];
	switch (draw(actor, 3)) {
	case 0:
		some = everybody;
		break;
	case 1:
		some = 1u << draw(actor, RECEIVERS);
		break;
	default:
		while (!some)
			some = draw(actor, everybody);
	}
	shared->quiet = true;
	shared->receiving = some;
	while (!is_settled()) {
		if (++turns > DRAIN_TIMEOUT_MS) {
			/*
			 * No polls: it is in a call. Many: the call finds
			 * nothing.
			 */
			for (int at = 0; at < RECEIVERS; at++)
				if (some & 1u << at)
					fprintf(stderr,
						"stress: receiver %d (process %u, thread %u) looked %u times, last at socket %u, step %u of %s\n",
						at, shared->process[at],
						shared->thread[at],
						shared->polls[at] - before[at],
						shared->last[at],
						shared->line[at],
						shared->line[at] ? "shared.c" :
								   "private.c");
			report_all();
			fail("receivers %x of %x do not get what is queued, or %u of %u replies do not come",
			     some, everybody,
			     shared->replies - shared->replies_received,
			     shared->replies);
		}
		usleep(1000);
	}
	uint32_t least = ~0u;
	for (int at = 0; at < RECEIVERS; at++) {
		uint32_t polls = shared->polls[at] - before[at];

		if (some & 1u << at && polls < least)
			least = polls;
	}
	if (turns > longest)
		longest = turns;
	if (least > rounds)
		rounds = least;
	shared->receiving = everybody;
	shared->quiet = false;
}

static void child(uint32_t number, int before, pid_t parent)
{
	struct actor actor = actor_of(number, 0);

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	while (run_actor(&actor, 1000))
		actor.favourite = draw(&actor, SOCKETS);
	end_actor(&actor);
	for (int at = 0; at < SOCKETS; at++)
		close(shared->socket[at].fd);
	CHECK(count_descriptors() == before,
	      "a child has %d descriptors, not %d", count_descriptors(),
	      before);
	_exit(0);
}

int main(int argc, char **argv)
{
	double start = now(), seconds = argc > 1 ? atof(argv[1]) : 10;
	uint64_t seed = argc > 2 ?
				strtoull(argv[2], NULL, 0) :
				(uint64_t)time(NULL) << 20 ^ (uint64_t)getpid();
	pthread_t receivers[THREADS], senders[SENDERS];
	int before = count_descriptors(), status;
	pid_t self = getpid();
	struct actor actor;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* A failure kills the process group. */
	setpgid(0, 0);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (shared == MAP_FAILED)
		return 1;
	shared->seed = seed;
	shared->receiving = (1u << RECEIVERS) - 1;
	actor = actor_of(RECEIVERS + SENDERS, 0);
	fprintf(stderr, "stress: seed %llu\n", (unsigned long long)seed);
	open_shared();
	for (uint32_t at = 0; at < CHILDREN; at++) {
		children[at] = fork();
		if (!children[at])
			child(THREADS + at, before, self);
	}
	for (uintptr_t at = 0; at < THREADS; at++)
		CHECK(!pthread_create(&receivers[at], NULL, run_forever,
				      (void *)at),
		      "pthread_create");
	for (uintptr_t at = 0; at < SENDERS; at++)
		CHECK(!pthread_create(&senders[at], NULL, send_all, (void *)at),
		      "pthread_create");
	while (now() - start < seconds) {
		usleep(100000 + 1000 * draw(&actor, 600));
		drain_and_check(&actor);
	}
	drain_and_check(&actor);
	shared->quiet = true;
	shared->stop = true;
	for (int at = 0; at < SENDERS; at++)
		pthread_join(senders[at], NULL);
	for (int at = 0; at < THREADS; at++)
		pthread_join(receivers[at], NULL);
	for (int at = 0; at < CHILDREN; at++)
		CHECK(waitpid(children[at], &status, 0) == children[at] &&
			      !status,
		      "a child ended with %x", status);
	for (int at = 0; at < SOCKETS; at++)
		CHECK(!close(shared->socket[at].fd), "close: %m");
	CHECK(count_descriptors() == before, "%d descriptors are open, not %d",
	      count_descriptors(), before);
	fprintf(stderr,
		"stress: the longest pause took %u sleeps, and %u looks of who got least\n",
		longest, rounds);
	if (shared->late)
		fprintf(stderr,
			"stress: %u calls were ahead of the kernel's delivery\n",
			shared->late);
	printf("stress: %u datagrams, %u replies, %llu calls, nothing lost, nothing twice, nothing leaked\n",
	       shared->ids, shared->replies, (unsigned long long)shared->calls);
	return 0;
}
