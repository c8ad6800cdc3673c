/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * differential < SCRIPTS: each script is lines of "ACTOR CALL ARGUMENT...", and
 * ends with a line "end". It runs in a process of its own, in which actors 0 to
 * 3 are threads and 4 and 5 children that a step forks. One step is made at a
 * time, so that each run of a script is the same.
 */
#include "differential.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Seconds that a script may take: longer than a busy machine needs. */
#define PATIENCE 20

struct shared *all;
int slots[SLOTS];
static char **lines; /* of the script */
static size_t count;
static pthread_t threads[THREADS];
static pid_t first_process;

static void wait_for(sem_t *sem)
{
	struct timespec later;

	do {
		clock_gettime(CLOCK_REALTIME, &later);
		later.tv_sec++;
		/* The death of a thread would be told as that of the parent. */
		if (getpid() != first_process && getppid() != first_process)
			_exit(1);
	} while (sem_timedwait(sem, &later));
}

static void *act(void *number);

static void start_thread(int actor)
{
	if (pthread_create(&threads[actor], NULL, act, (void *)(long)actor))
		say(" no thread");
}

/* The child goes on as an actor of its own; it has the descriptors of now. */
static void step_fork(struct step *step)
{
	int actor = THREADS + (int)step->arg[0].value % (ACTORS - THREADS);
	pid_t pid;

	if (all->pid[actor] || getpid() != first_process) {
		say(" skipped");
		return;
	}
	pid = fork();
	if (!pid)
		act((void *)(long)actor);
	all->has_forked = true;
	say(pid < 0 ? " = -1" : " = a child");
	all->pid[actor] = pid < 0 ? 0 : pid;
}

/* select(2) passes over numbers beyond the table of descriptors: a full one. */
static void grow_table(void)
{
	syscall(SYS_dup3, 0, 1023, 0);
	syscall(SYS_close, 1023);
}

/* Whose step is next; nobody's at the end. */
static int next_actor(void)
{
	return all->next < count ? atoi(lines[all->next]) % ACTORS : -1;
}

static bool is_next(const char *call)
{
	const char *at = strchr(lines[all->next], ' ');

	return at && !strcmp(at + 1, call);
}

static void begin_step(void)
{
	const char *line = lines[all->next];

	say("%.*s:", (int)strcspn(line, "\n"), line);
}

static void end_step(void)
{
	say("\n");
	all->next++;
}

static void make_step(void)
{
	char line[256];
	struct step step;

	begin_step();
	snprintf(line, sizeof(line), "%s", lines[all->next]);
	if (!parse(line, &step))
		say(" what?");
	else if (!strcmp(step.name, "fork"))
		step_fork(&step);
	else
		run(&step);
	end_step();
	/* With --batch, what was sent may be kept until the thread sleeps. */
	usleep(0);
}

/* Makes the steps of one actor, each when it is its turn. */
static void *act(void *number)
{
	int actor = (int)(long)number;

	if (actor >= THREADS)
		grow_table();
	for (;;) {
		wait_for(&all->turn[actor]);
		if (is_next("leave\n"))
			break;
		while (next_actor() == actor && !is_next("leave\n"))
			make_step();
		sem_post(&all->done);
	}
	/* A child ends, and a thread: it is waited for. */
	if (actor >= THREADS)
		_exit(0);
	return NULL;
}

/* Until an actor has made its steps, or died over one. */
static void wait_for_steps(int actor)
{
	struct timespec soon;
	int status;

	for (;;) {
		clock_gettime(CLOCK_REALTIME, &soon);
		soon.tv_nsec += 20000000;
		soon.tv_sec += soon.tv_nsec / 1000000000;
		soon.tv_nsec %= 1000000000;
		if (!sem_timedwait(&all->done, &soon))
			return;
		if (actor < THREADS ||
		    waitpid(all->pid[actor], &status, WNOHANG) <= 0)
			continue;
		say(" died with status %x", status);
		all->pid[actor] = 0;
		end_step();
		return;
	}
}

static void leave(int actor)
{
	int status;

	left(actor);
	sem_post(&all->turn[actor]);
	if (actor < THREADS) {
		pthread_join(threads[actor], NULL);
		start_thread(actor);
		return;
	}
	waitpid(all->pid[actor], &status, 0);
	say(" ended with status %x", status);
	all->pid[actor] = 0;
}

static void play(void)
{
	int actor;

	first_process = getpid();
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(PATIENCE);
	memset(slots, 0xff, sizeof(slots));
	grow_table();
	for (int at = 0; at < THREADS; at++)
		start_thread(at);
	while ((actor = next_actor()) >= 0) {
		bool is_there = actor < THREADS || all->pid[actor];

		if (is_there && !is_next("leave\n")) {
			sem_post(&all->turn[actor]);
			wait_for_steps(actor);
			continue;
		}
		begin_step();
		if (is_there)
			leave(actor);
		else
			say(" nobody");
		end_step();
	}
	_exit(0);
}

/* One script in a process of its own, that ends with all that it has opened. */
static void play_alone(void)
{
	int status = -1;
	pid_t pid;

	memset(all, 0, sizeof(*all));
	all->ports = 1;
	for (int at = 0; at < ACTORS; at++)
		sem_init(&all->turn[at], 1, 0);
	sem_init(&all->done, 1, 0);
	fflush(stdout);
	pid = fork();
	if (!pid)
		play();
	waitpid(pid, &status, 0);
	/* Children that it has left behind. */
	for (int at = THREADS; at < ACTORS; at++)
		if (all->pid[at])
			kill(all->pid[at], SIGKILL);
	while (waitpid(-1, NULL, 0) > 0)
		;
	fwrite(all->log, 1, all->len, stdout);
	printf("end: status %x\n\n", status);
	fflush(stdout);
}

int main(void)
{
	struct rlimit limit = { 1024, 1024 };
	char *line = NULL;
	size_t size = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	setrlimit(RLIMIT_NOFILE, &limit);
	signal(SIGPIPE, SIG_IGN);
	all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED)
		return 1;
	while (getline(&line, &size, stdin) >= 0) {
		if (!strcmp(line, "end\n")) {
			play_alone();
			while (count)
				free(lines[--count]);
			continue;
		}
		lines = realloc(lines, (count + 1) * sizeof(*lines));
		lines[count++] = strdup(line);
	}
	return 0;
}
