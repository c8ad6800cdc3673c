/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Threads join and leave while datagrams of many flows are queued. One thread
 * receives at a time, so there is an order:
 *
 *	receiver_churn order	the order within each flow is kept
 *	receiver_churn flood	the queue from before the second thread joined is never
 *			empty, and the other flows are received all the same
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loopback.h"

#define FLOWS 16
#define RECEIVERS 3
#define RECEIVES_MAX 1000000

struct receiver {
	pthread_t thread;
	sem_t start, done;
	bool is_leaving;
	int flow;
};

static int server, senders[FLOWS];
static struct sockaddr_in address;
static struct receiver receivers[RECEIVERS];
static unsigned sent[FLOWS], received[FLOWS], total, out_of_order;

static void send_one(int flow)
{
	unsigned message[2] = { flow, ++sent[flow] };

	if (sendto(senders[flow], message, sizeof(message), 0, (void *)&address,
		   sizeof(address)) != sizeof(message)) {
		perror("sendto");
		exit(1);
	}
}

static void send_to_all(void)
{
	for (int flow = 0; flow < FLOWS; flow++)
		send_one(flow);
	wait_for_delivery();
}

/* Receives once for each post of `start`; flow is -1 if the queue was empty. */
static void *receive(void *argument)
{
	struct receiver *receiver = argument;

	for (;;) {
		unsigned message[2];

		sem_wait(&receiver->start);
		if (receiver->is_leaving)
			return NULL;
		receiver->flow = -1;
		if (recv(server, message, sizeof(message), 0) ==
		    sizeof(message)) {
			receiver->flow = message[0];
			out_of_order += message[1] != ++received[message[0]];
			total++;
		} else if (errno != EAGAIN) {
			perror("recv");
			exit(1);
		}
		sem_post(&receiver->done);
	}
}

static int receive_by(struct receiver *receiver)
{
	sem_post(&receiver->start);
	sem_wait(&receiver->done);
	return receiver->flow;
}

static void drain_by(struct receiver *receiver)
{
	while (receive_by(receiver) >= 0)
		;
}

/* Lets two threads receive until they have lanes. */
static void add_two_receivers(void)
{
	for (int i = 0; i < 8; i++) {
		send_one(i);
		wait_for_delivery();
		receive_by(&receivers[i % 2]);
	}
}

static void stop_receiver(struct receiver *receiver)
{
	receiver->is_leaving = true;
	sem_post(&receiver->start);
	pthread_join(receiver->thread, NULL);
}

static void test_order(void)
{
	add_two_receivers();
	/*
	 * The flows of the lane that the thread leaves move to the other one.
	 */
	send_to_all();
	stop_receiver(&receivers[0]);
	send_to_all();
	drain_by(&receivers[1]);
	/* Some of them move to the new lane. */
	send_to_all();
	receive_by(&receivers[2]);
	receive_by(&receivers[2]);
	send_to_all();
	drain_by(&receivers[2]);
	printf("received %u, out of order %u\n", total, out_of_order);
}

static bool is_each_received(unsigned times)
{
	for (int flow = 0; flow < FLOWS; flow++)
		if (received[flow] < times)
			return false;
	return true;
}

/* Each received datagram causes another one of its flow. */
static void test_flood(void)
{
	send_to_all();
	send_to_all();
	for (int i = 0; !is_each_received(4) && i < RECEIVES_MAX; i++) {
		int flow = receive_by(&receivers[i % 2]);

		if (flow >= 0)
			send_one(flow);
	}
	printf("each flow was received: %s, out of order %u\n",
	       is_each_received(4) ? "yes" : "no", out_of_order);
}

int main(int argc, char **argv)
{
	pin_to_this_cpu();
	server = loopback_server(SOCK_NONBLOCK, &address);
	for (int flow = 0; flow < FLOWS; flow++) {
		struct sockaddr_in unused;

		senders[flow] = loopback_server(0, &unused);
	}
	for (int i = 0; i < RECEIVERS; i++) {
		sem_init(&receivers[i].start, 0, 0);
		sem_init(&receivers[i].done, 0, 0);
		pthread_create(&receivers[i].thread, NULL, receive,
			       &receivers[i]);
	}
	if (argc > 1 && !strcmp(argv[1], "flood"))
		test_flood();
	else
		test_order();
	return 0;
}
