/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * differential < SCRIPTS: each script consists of lines "ACTOR CALL
 * ARGUMENT...", and ends with a line "end". It runs in a process of its own.
 * Actors 0 to 3 are threads, and 4 and 5 are children that a step forks. One
 * step runs at a time, so that each run of a script is the same. A step "ACTOR+
 * CALL ..." may wait for what the next one sends.
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

/* Seconds that a script may take: more than a busy machine needs. */
#define TIMEOUT_S 150
/* Less than the waits that a datagram shall end, of 300 ms. */
#define LATE_MS 150

struct shared *shared;
int slots[SLOTS];
bool has_own_network;
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
		/*
		 * PR_SET_PDEATHSIG reports the death of a thread, not of the
		 * process.
		 */
		if (getpid() != first_process && getppid() != first_process)
			_exit(1);
	} while (sem_timedwait(sem, &later));
}

static void *run_actor(void *number);

static void start_thread(int actor)
{
	if (pthread_create(&threads[actor], NULL, run_actor,
			   (void *)(long)actor))
		print(" no thread");
}

/* The child continues as an actor, with the descriptors of this moment. */
static void step_fork(struct step *step)
{
	int actor = THREADS + (int)step->arg[0].value % (ACTORS - THREADS);
	pid_t pid;

	if (shared->pid[actor] || getpid() != first_process) {
		print(" skipped");
		return;
	}
	pid = fork();
	if (!pid)
		run_actor((void *)(long)actor);
	shared->has_forked = true;
	print(pid < 0 ? " = -1" : " = a child");
	shared->pid[actor] = pid < 0 ? 0 : pid;
}

/* select(2) ignores numbers beyond the table of descriptors: grows it. */
static void grow_fd_table(void)
{
	syscall(SYS_dup3, 0, 1023, 0);
	syscall(SYS_close, 1023);
}

/* The actor of the next step; -1 at the end. */
static int next_actor(void)
{
	return shared->next < count ? atoi(lines[shared->next]) % ACTORS : -1;
}

static bool is_next(const char *call)
{
	const char *at = strchr(lines[shared->next], ' ');

	return at && !strcmp(at + 1, call);
}

/* True for "1+ recv ...": it runs beside the next step, if that sends. */
static bool is_beside(size_t at)
{
	return at < count && strchr(lines[at], '+') == lines[at] + 1;
}

static void begin_step(size_t at)
{
	print("%.*s:", (int)strcspn(lines[at], "\n"), lines[at]);
}

static void end_step(void)
{
	print("\n");
	shared->next++;
}

static void run_step(size_t at)
{
	char line[256];
	struct step step;

	begin_step(at);
	snprintf(line, sizeof(line), "%s", lines[at]);
	if (!parse(line, &step))
		print(" what?");
	else if (!strcmp(step.name, "fork"))
		step_fork(&step);
	else
		run(&step);
	/* Replies that are sent together may be kept until the thread sleeps. */
	usleep(0);
}

/* Runs the steps of one actor, each when it is due. */
static void *run_actor(void *number)
{
	int actor = (int)(long)number;

	if (actor >= THREADS)
		grow_fd_table();
	for (;;) {
		wait_for(&shared->turn[actor]);
		if (shared->beside[actor]) {
			current_log = &shared->log_beside[actor];
			run_step(shared->beside[actor]);
			current_log = NULL;
		} else if (is_next("leave\n")) {
			break;
		} else {
			/*
			 * Consecutive steps of one actor need no change of
			 * threads.
			 */
			do {
				run_step(shared->next);
				end_step();
			} while (!shared->is_pair && next_actor() == actor &&
				 !is_beside(shared->next) &&
				 !is_next("leave\n"));
		}
		sem_post(&shared->done[actor]);
	}
	/* A child exits; a thread is joined. */
	if (actor >= THREADS)
		_exit(0);
	return NULL;
}

/* Waits until an actor has run its step: false if it died. */
static bool wait_for_step(int actor)
{
	struct timespec soon;
	int status;

	for (;;) {
		clock_gettime(CLOCK_REALTIME, &soon);
		soon.tv_nsec += 20000000;
		soon.tv_sec += soon.tv_nsec / 1000000000;
		soon.tv_nsec %= 1000000000;
		if (!sem_timedwait(&shared->done[actor], &soon))
			return true;
		if (actor < THREADS ||
		    waitpid(shared->pid[actor], &status, WNOHANG) <= 0)
			continue;
		print(" died with status %x", status);
		shared->pid[actor] = 0;
		return false;
	}
}

static void end_actor(int actor)
{
	int status;

	on_actor_exit(actor);
	sem_post(&shared->turn[actor]);
	if (actor < THREADS) {
		pthread_join(threads[actor], NULL);
		start_thread(actor);
		return;
	}
	waitpid(shared->pid[actor], &status, 0);
	print(" ended with status %x", status);
	shared->pid[actor] = 0;
}

static void run_next(int actor)
{
	if (actor >= THREADS && !shared->pid[actor]) {
		begin_step(shared->next);
		print(" nobody");
		end_step();
	} else if (is_next("leave\n")) {
		begin_step(shared->next);
		end_actor(actor);
		end_step();
	} else {
		sem_post(&shared->turn[actor]);
		if (!wait_for_step(actor))
			end_step();
	}
}

/* True if a step has checked the queue, or has ended. */
static bool has_begun(int actor)
{
	int done = 0;

	sem_getvalue(&shared->done[actor], &done);
	return shared->begun_ms[actor] || done > 0;
}

long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/*
 * Runs a step that may wait, and the next one, which may end the wait. If the
 * next one had no CPU for so long that the wait may have timed out before, the
 * output says so.
 */
static void run_two(int actor)
{
	shared->beside[actor] = shared->next;
	shared->begun_ms[actor] = 0;
	sem_post(&shared->turn[actor]);
	shared->next++;
	shared->is_pair = true;
	/*
	 * A datagram that it finds without a wait must not be one of the next
	 * step.
	 */
	while (!has_begun(actor))
		usleep(200);
	/* By then it usually waits; if not, the result is the same. */
	usleep(1000);
	if (next_actor() >= 0 && next_actor() != actor &&
	    strstr(lines[shared->next], " send"))
		run_next(next_actor());
	if (shared->begun_ms[actor] &&
	    now_ms() - shared->begun_ms[actor] > LATE_MS)
		print("late\n");
	wait_for_step(actor);
	shared->is_pair = false;
	on_long_wait();
	shared->beside[actor] = 0;
	print("%s\n", shared->log_beside[actor].text);
	shared->log_beside[actor].len = 0;
}

static void run_script(void)
{
	int actor;

	first_process = getpid();
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	alarm(TIMEOUT_S);
	memset(slots, 0xff, sizeof(slots));
	grow_fd_table();
	for (int at = 0; at < THREADS; at++)
		start_thread(at);
	while ((actor = next_actor()) >= 0) {
		if (is_beside(shared->next) && shared->next &&
		    (actor < THREADS || shared->pid[actor]))
			run_two(actor);
		else
			run_next(actor);
	}
	_exit(0);
}

/*
 * Runs one script in a process of its own, which closes all descriptors at its
 * end.
 */
static void run_script_in_child(void)
{
	int status = -1;
	pid_t pid;

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		exit(1);
	shared->ports = 1;
	for (int at = 0; at < ACTORS; at++) {
		sem_init(&shared->turn[at], 1, 0);
		sem_init(&shared->done[at], 1, 0);
	}
	fflush(stdout);
	pid = fork();
	if (!pid)
		run_script();
	waitpid(pid, &status, 0);
	/* Children that it has left behind. */
	for (int at = THREADS; at < ACTORS; at++)
		if (shared->pid[at])
			kill(shared->pid[at], SIGKILL);
	while (waitpid(-1, NULL, 0) > 0)
		;
	fwrite(shared->log.text, 1, shared->log.len, stdout);
	printf("end: status %x\n\n", status);
	fflush(stdout);
	munmap(shared, sizeof(*shared));
}

/*
 * Other processes like this one run at the same time, and the kernel gives the
 * port that one has closed to another. A datagram to the first would then reach
 * the second. Each has its own network namespace where that is permitted.
 */
static void unshare_network(void)
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
	has_own_network = true;
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
	unshare_network();
	while (getline(&line, &size, stdin) >= 0) {
		if (!strcmp(line, "end\n")) {
			run_script_in_child();
			while (count)
				free(lines[--count]);
			continue;
		}
		lines = realloc(lines, (count + 1) * sizeof(*lines));
		lines[count++] = strdup(line);
	}
	return 0;
}
