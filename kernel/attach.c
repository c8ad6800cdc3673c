// SPDX-License-Identifier: GPL-2.0-only
/*
 * Attaching: an ordinary UDP socket gets queues, and operations of ours.
 *
 *   1. check   what cannot be attached is refused, and left as it was
 *   2. state   queues are created before the socket is touched
 *   3. take    callbacks, operations, then the hook through which datagrams come
 *   4. free    after the last reference to the socket, in a work of our own
 *
 * A socket stays attached until it ends. It holds the module twice: as the owner
 * of the operations of its struct socket, which the kernel puts when that is
 * released, and for its struct sock, whose end may come later, in free_work().
 */
#include <linux/module.h>
#include <linux/rcupdate.h>
#include <net/inet_common.h>
#include <net/udp.h>
#include <net/udp_tunnel.h>

#include "manylane.h"

/* Any value but 0, which UDP takes for "no tunnel". Other tunnels use 1, too. */
#define ENCAP_TYPE 1

enum family {
	FAMILY_4,
	FAMILY_6,
	FAMILIES,
};

static struct proto protos[FAMILIES];
static struct proto_ops operations[FAMILIES];
/* What ours were copied from, or NULL; udpv6_prot is not exported, and a socket shows it. */
static const struct proto *copied_from[FAMILIES];
static DEFINE_MUTEX(copy_mutex);

static struct workqueue_struct *free_queue;

/* Process context. */
static void free_work(struct work_struct *work)
{
	struct ml_socket *ml = container_of(work, struct ml_socket, free_work);
	struct module *base_owner = ml->base_ops->owner;

	ml_socket_free(ml);
	module_put(base_owner);
	/* ml_attach_exit() waits for the end of this function. */
	module_put(THIS_MODULE);
}

/*
 * The last reference is gone, and so is every datagram on its way here: UDP
 * frees sockets that were bound after a grace period. Any context.
 */
static void destruct(struct sock *sk)
{
	struct ml_socket *ml = ml_of(sk);

	ml->base_destruct(sk);
	RCU_INIT_POINTER(__sk_user_data(sk), NULL);
	queue_work(free_queue, &ml->free_work);
}

/* A datagram is in the socket's own queue. Softirqs or process context. */
static void data_ready(struct sock *sk)
{
	struct ml_socket *ml = ml_of(sk);

	ml_wake_one(ml_own_queue(ml));
	ml->base_data_ready(sk);
}

/* shutdown(2): blocked receives return. */
static void state_change(struct sock *sk)
{
	struct ml_socket *ml = ml_of(sk);

	ml_wake_all(ml);
	ml->base_state_change(sk);
}

static void error_report(struct sock *sk)
{
	struct ml_socket *ml = ml_of(sk);

	ml_wake_all(ml);
	ml->base_error_report(sk);
}

/* Our operations are those of the family, but for what concerns receiving. */
static void copy_operations(enum family family, const struct socket *sock)
{
	struct proto_ops *ops = &operations[family];
	struct proto *proto = &protos[family];

	mutex_lock(&copy_mutex);
	if (!copied_from[family]) {
		*proto = *sock->sk->sk_prot;
		proto->recvmsg = ml_recvmsg;
		proto->setsockopt = ml_setsockopt;

		*ops = *sock->ops;
		ops->owner = THIS_MODULE;
		ops->poll = ml_poll;
		ops->ioctl = ml_ioctl;
		/* An offset would count through all queues, and they have no order. */
		ops->set_peek_off = NULL;
		copied_from[family] = sock->sk->sk_prot;
	}
	mutex_unlock(&copy_mutex);
}

/* Stage 1. The socket is locked. */
static int check(struct socket *sock)
{
	struct sock *sk = sock->sk;
	struct udp_sock *up = udp_sk(sk);

	/* Tunnels, sockmaps and reuseport arrays use these; so do we, once. */
	if (up->encap_type || up->encap_rcv || sk->sk_user_data)
		return -EBUSY;
	if (sock->ops->poll != udp_poll || sk->sk_prot->recvmsg == ml_recvmsg)
		return -EBUSY;
	if (sk->sk_family == AF_INET && sk->sk_prot != &udp_prot)
		return -EBUSY;
	if (sk->sk_family == AF_INET6 && sk->sk_prot != sk->sk_prot_creator)
		return -EBUSY;
	/* SO_PEEK_OFF, see copy_operations(). */
	if (READ_ONCE(sk->sk_peek_off) >= 0)
		return -EOPNOTSUPP;
	return 0;
}

/* Stage 3. The socket is locked. */
static void take_over(struct socket *sock, struct ml_socket *ml,
		      enum family family)
{
	struct sock *sk = sock->sk;

	ml->base_ops = sock->ops;
	ml->base_proto = sk->sk_prot;
	ml->base_destruct = sk->sk_destruct;
	ml->stranger_seen = jiffies;
	ml->strangers = true;
	__module_get(THIS_MODULE);
	__module_get(THIS_MODULE);

	write_lock_bh(&sk->sk_callback_lock);
	ml->base_data_ready = sk->sk_data_ready;
	ml->base_state_change = sk->sk_state_change;
	ml->base_error_report = sk->sk_error_report;
	rcu_assign_sk_user_data(sk, ml);
	/* Pairs with smp_rmb() of ml_of(). */
	smp_wmb();
	WRITE_ONCE(sk->sk_data_ready, data_ready);
	WRITE_ONCE(sk->sk_state_change, state_change);
	WRITE_ONCE(sk->sk_error_report, error_report);
	write_unlock_bh(&sk->sk_callback_lock);

	sk->sk_destruct = destruct;
	WRITE_ONCE(sk->sk_prot, &protos[family]);
	WRITE_ONCE(sock->ops, &operations[family]);

	/* From here on receives look into the queues: datagrams may come. */
	ml_set_error_handler(sk);
	WRITE_ONCE(udp_sk(sk)->encap_rcv, ml_arrive);
	/* The key of the socket's families; UDP turns it off when it closes. */
	udp_tunnel_encap_enable(sk);
	smp_store_release(&udp_sk(sk)->encap_type, ENCAP_TYPE);
}

/* Returns the number of queues. Process context; the caller holds the socket. */
int ml_attach(struct socket *sock, u32 policy, u32 queues)
{
	struct sock *sk = sock->sk;
	struct ml_socket *ml;
	enum family family;
	int err;

	if (!sk || sk->sk_type != SOCK_DGRAM || sk->sk_protocol != IPPROTO_UDP)
		return -EPROTONOSUPPORT;
	if (sk->sk_family != AF_INET && sk->sk_family != AF_INET6)
		return -EPROTONOSUPPORT;
	if (policy != MANYLANE_ROUND_ROBIN && policy != MANYLANE_FLOW)
		return -EINVAL;
	if (queues > MANYLANE_QUEUES_MAX)
		return -EINVAL;
	if (!queues)
		queues = min_t(u32, num_online_cpus(), MANYLANE_QUEUES_MAX);

	ml = ml_socket_create(sock_net(sk), policy, queues);
	if (IS_ERR(ml))
		return PTR_ERR(ml);
	INIT_WORK(&ml->free_work, free_work);

	lock_sock(sk);
	err = check(sock);
	if (!err) {
		/* Not before the lock: IPV6_ADDRFORM changes it. */
		family = sk->sk_family == AF_INET6 ? FAMILY_6 : FAMILY_4;
		copy_operations(family, sock);
		take_over(sock, ml, family);
	}
	release_sock(sk);
	if (err) {
		ml_socket_free(ml);
		return err;
	}
	return queues;
}

int ml_attach_init(void)
{
	free_queue = alloc_workqueue("manylane", 0, 0);
	return free_queue ? 0 : -ENOMEM;
}

/* No socket holds the module: what is left are the ends of functions that put it. */
void ml_attach_exit(void)
{
	/* destruct(), where it was called by RCU */
	rcu_barrier();
	/* destruct(), where a task called it */
	synchronize_rcu_tasks();
	/* free_work() */
	destroy_workqueue(free_queue);
}
