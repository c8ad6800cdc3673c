/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What calls for one datagram and for many cost: nanoseconds of CPU for each. Links nothing of Manylane. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
static double now()
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}
int main()
{
	int s = socket(2, 2, 0), c = socket(2, 2, 0);
	struct sockaddr_in a = { .sin_family = 2,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t l = sizeof a;
	int big = 1 << 22;
	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &big, 4);
	bind(s, (void *)&a, l);
	getsockname(s, (void *)&a, &l);
	static char bufs[32][2048];
	static char far[32][62000];
	struct mmsghdr m[32];
	struct iovec v[32][2];
	struct sockaddr_storage n[32];
	char b[2048];
	for (int r = 0; r < 6; r++) {
		double t0, t1;
		double s1 = 0, s2 = 0, r1 = 0, r2 = 0, e = 0;
		for (int k = 0; k < 300; k++) {
			t0 = now();
			for (int i = 0; i < 96; i++)
				sendto(c, "0123456789abcdefghijklmnopqrst", 30,
				       0, (void *)&a, l);
			t1 = now();
			s1 += t1 - t0;
			t0 = now();
			for (int i = 0; i < 96; i++) {
				socklen_t q = sizeof n[0];
				recvfrom(s, b, 2048, MSG_DONTWAIT,
					 (void *)&n[0], &q);
			}
			t1 = now();
			r1 += t1 - t0;
			for (int i = 0; i < 32; i++) {
				v[i][0] = (struct iovec){
					"0123456789abcdefghijklmnopqrst", 30
				};
				m[i].msg_hdr =
					(struct msghdr){ .msg_name = &a,
							 .msg_namelen = l,
							 .msg_iov = v[i],
							 .msg_iovlen = 1 };
			}
			t0 = now();
			for (int i = 0; i < 96; i += 32)
				sendmmsg(c, m, 32, 0);
			t1 = now();
			s2 += t1 - t0;
			for (int i = 0; i < 32; i++) {
				v[i][0] = (struct iovec){ bufs[i], 2048 };
				v[i][1] = (struct iovec){ far[i], 62000 };
				m[i].msg_hdr =
					(struct msghdr){ .msg_name = &n[i],
							 .msg_namelen = 28,
							 .msg_iov = v[i],
							 .msg_iovlen = 2 };
			}
			t0 = now();
			for (int i = 0; i < 96; i += 32) {
				for (int j = 0; j < 32; j++)
					m[j].msg_hdr.msg_namelen = 28;
				int g = recvmmsg(s, m, 32, MSG_DONTWAIT, 0);
				if (g != 32)
					printf("%d\n", g);
				for (int j = 0; j < g; j++)
					memcpy(b, bufs[j], m[j].msg_len);
			}
			t1 = now();
			r2 += t1 - t0;
			t0 = now();
			for (int i = 0; i < 96; i++)
				recvfrom(s, b, 2048, MSG_DONTWAIT, 0, 0);
			t1 = now();
			e += t1 - t0;
		}
		double d = 96 * 300;
		printf("sendto %.0f sendmmsg %.0f recvfrom %.0f recvmmsg %.0f eagain %.0f getppid ",
		       s1 / d, s2 / d, r1 / d, r2 / d, e / d);
		t0 = now();
		for (int i = 0; i < 100000; i++)
			syscall(SYS_getppid);
		t1 = now();
		printf("%.0f\n", (t1 - t0) / 1e5);
	}
}
