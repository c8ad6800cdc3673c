/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Included before a program that is built with ThreadSanitizer: calls go to the
 * library under test (to the C library without one), and bypass the sanitizer's
 * interceptors, which are in the program and so precede it.
 *
 * While an interceptor of a call that may wait is active, the sanitizer ignores
 * atomics but still records memory accesses. So everything that the library's
 * atomics order looks like a race. Other interceptors treat a descriptor as
 * memory that is written when it is closed or created, and programs here reuse
 * descriptors on purpose.
 *
 * The sanitizer does not see the order that a pipe or a socket creates, so
 * threads of a program use atomics. Signal handlers are left to the sanitizer,
 * which has to know of them.
 */
#ifndef BYPASS_TSAN_H
#define BYPASS_TSAN_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define DIRECT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define accept(...) DIRECT(accept)(__VA_ARGS__)
#define accept4(...) DIRECT(accept4)(__VA_ARGS__)
#define bind(...) DIRECT(bind)(__VA_ARGS__)
#define close(...) DIRECT(close)(__VA_ARGS__)
#define connect(...) DIRECT(connect)(__VA_ARGS__)
#define creat(...) DIRECT(creat)(__VA_ARGS__)
#define dup(...) DIRECT(dup)(__VA_ARGS__)
#define dup2(...) DIRECT(dup2)(__VA_ARGS__)
#define dup3(...) DIRECT(dup3)(__VA_ARGS__)
#define epoll_create(...) DIRECT(epoll_create)(__VA_ARGS__)
#define epoll_create1(...) DIRECT(epoll_create1)(__VA_ARGS__)
#define epoll_ctl(...) DIRECT(epoll_ctl)(__VA_ARGS__)
#define epoll_pwait(...) DIRECT(epoll_pwait)(__VA_ARGS__)
#define epoll_pwait2(...) DIRECT(epoll_pwait2)(__VA_ARGS__)
#define epoll_wait(...) DIRECT(epoll_wait)(__VA_ARGS__)
#define eventfd(...) DIRECT(eventfd)(__VA_ARGS__)
#define getpeername(...) DIRECT(getpeername)(__VA_ARGS__)
#define getsockname(...) DIRECT(getsockname)(__VA_ARGS__)
#define getsockopt(...) DIRECT(getsockopt)(__VA_ARGS__)
#define ioctl(...) DIRECT(ioctl)(__VA_ARGS__)
#define nanosleep(...) DIRECT(nanosleep)(__VA_ARGS__)
#define open(...) DIRECT(open)(__VA_ARGS__)
#define pipe(...) DIRECT(pipe)(__VA_ARGS__)
#define pipe2(...) DIRECT(pipe2)(__VA_ARGS__)
#define poll(...) DIRECT(poll)(__VA_ARGS__)
#define ppoll(...) DIRECT(ppoll)(__VA_ARGS__)
#define read(...) DIRECT(read)(__VA_ARGS__)
#define readv(...) DIRECT(readv)(__VA_ARGS__)
#define recv(...) DIRECT(recv)(__VA_ARGS__)
#define recvfrom(...) DIRECT(recvfrom)(__VA_ARGS__)
#define recvmmsg(...) DIRECT(recvmmsg)(__VA_ARGS__)
#define recvmsg(...) DIRECT(recvmsg)(__VA_ARGS__)
#define send(...) DIRECT(send)(__VA_ARGS__)
#define sendmmsg(...) DIRECT(sendmmsg)(__VA_ARGS__)
#define sendmsg(...) DIRECT(sendmsg)(__VA_ARGS__)
#define sendto(...) DIRECT(sendto)(__VA_ARGS__)
#define signalfd(...) DIRECT(signalfd)(__VA_ARGS__)
#define sleep(...) DIRECT(sleep)(__VA_ARGS__)
#define socket(...) DIRECT(socket)(__VA_ARGS__)
#define socketpair(...) DIRECT(socketpair)(__VA_ARGS__)
#define usleep(...) DIRECT(usleep)(__VA_ARGS__)
#define write(...) DIRECT(write)(__VA_ARGS__)
#define writev(...) DIRECT(writev)(__VA_ARGS__)

#endif
