/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * differential < SCRIPTS: each script is lines of "ACTOR CALL ARGUMENT...", and
 * ends with a line "end". It runs in a process of its own, in which actors 0 to
 * 3 are threads and 4 and 5 children that a step forks. One step is made at a
 * time, so that each run of a script is the same; one of "ACTOR+ CALL ..." may
 * wait for what the next one sends.
 */
#include "differential.h"

#include <errno.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Seconds that a script may take: longer than a busy machine needs. */
#define PATIENCE 60

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

/* "1+ recv ...": beside the next step, if that sends. */
static bool is_beside(size_t at)
{
	return at < count && strchr(lines[at], '+') == lines[at] + 1;
}

static void begin_step(size_t at)
{
	say("%.*s:", (int)strcspn(lines[at], "\n"), lines[at]);
}

static void end_step(void)
{
	say("\n");
	all->next++;
}

static void make_step(size_t at)
{
	char line[256];
	struct step step;

	begin_step(at);
	snprintf(line, sizeof(line), "%s", lines[at]);
	if (!parse(line, &step))
		say(" what?");
	else if (!strcmp(step.name, "fork"))
		step_fork(&step);
	else
		run(&step);
	/* Replies that are sent together may be kept until the thread sleeps. */
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
		if (all->beside[actor]) {
			log_here = &all->log_beside[actor];
			make_step(all->beside[actor]);
			log_here = NULL;
		} else if (is_next("leave\n")) {
			break;
		} else {
			/* More of one actor cost no change of threads. */
			do {
				make_step(all->next);
				end_step();
			} while (!all->is_pair && next_actor() == actor &&
				 !is_beside(all->next) && !is_next("leave\n"));
		}
		sem_post(&all->done[actor]);
	}
	/* A child ends, and a thread: it is waited for. */
	if (actor >= THREADS)
		_exit(0);
	return NULL;
}

/* Until an actor has made its step: false if it died over it. */
static bool wait_for_step(int actor)
{
	struct timespec soon;
	int status;

	for (;;) {
		clock_gettime(CLOCK_REALTIME, &soon);
		soon.tv_nsec += 20000000;
		soon.tv_sec += soon.tv_nsec / 1000000000;
		soon.tv_nsec %= 1000000000;
		if (!sem_timedwait(&all->done[actor], &soon))
			return true;
		if (actor < THREADS ||
		    waitpid(all->pid[actor], &status, WNOHANG) <= 0)
			continue;
		say(" died with status %x", status);
		all->pid[actor] = 0;
		return false;
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

static void make_next(int actor)
{
	if (actor >= THREADS && !all->pid[actor]) {
		begin_step(all->next);
		say(" nobody");
		end_step();
	} else if (is_next("leave\n")) {
		begin_step(all->next);
		leave(actor);
		end_step();
	} else {
		sem_post(&all->turn[actor]);
		if (!wait_for_step(actor))
			end_step();
	}
}

/* Whether a step has looked at what is queued, or has ended. */
static bool has_begun(int actor)
{
	int done = 0;

	sem_getvalue(&all->done[actor], &done);
	return all->began[actor] || done > 0;
}

/* A step that may wait, and the next one, which may end that. */
static void make_two(int actor)
{
	all->beside[actor] = all->next;
	all->began[actor] = false;
	sem_post(&all->turn[actor]);
	all->next++;
	all->is_pair = true;
	/* What it finds without a wait must not be what the next step sends. */
	while (!has_begun(actor))
		usleep(200);
	/* Most of the time it waits by then; if not, the end is the same. */
	usleep(1000);
	if (next_actor() >= 0 && next_actor() != actor &&
	    strstr(lines[all->next], " send"))
		make_next(next_actor());
	wait_for_step(actor);
	all->is_pair = false;
	waited();
	all->beside[actor] = 0;
	say("%s\n", all->log_beside[actor].text);
	all->log_beside[actor].len = 0;
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
		if (is_beside(all->next) && all->next &&
		    (actor < THREADS || all->pid[actor]))
			make_two(actor);
		else
			make_next(actor);
	}
	_exit(0);
}

/* One script in a process of its own, that ends with all that it has opened. */
static void play_alone(void)
{
	int status = -1;
	pid_t pid;

	all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (all == MAP_FAILED)
		exit(1);
	all->ports = 1;
	for (int at = 0; at < ACTORS; at++) {
		sem_init(&all->turn[at], 1, 0);
		sem_init(&all->done[at], 1, 0);
	}
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
	fwrite(all->log.text, 1, all->log.len, stdout);
	printf("end: status %x\n\n", status);
	fflush(stdout);
	munmap(all, sizeof(*all));
}

/*
 * Other processes like this one run at the same time, and the kernel gives the
 * port that one has closed to another: a datagram that was sent to the first
 * would then reach the second. Each has a network of its own where that is
 * permitted.
 */
static void leave_network(void)
{
	struct ifreq loopback = { .ifr_name = "lo", .ifr_flags = IFF_UP };
	int fd;

	if (unshare(CLONE_NEWNET))
		return;
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &loopback)) {
		perror("lo");
		exit(1);
	}
	close(fd);
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
	leave_network();
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
