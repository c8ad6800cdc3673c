// SPDX-License-Identifier: GPL-2.0-only
/*
 * Remembered message headers: an array of struct mmsghdr is read and checked
 * once, and receives name a part of it.
 *
 *   register   addresses are checked, and kept as they are used by a receive
 *   receive    each message by the socket's own recvmsg(), so that plain calls
 *              beside it see no difference; its result into the program's array
 *   replace    by a new registration, or by none: receives that still use the old
 *              one hold it (kref); the last one frees it
 *
 * A registration does not change while it is used, so receives of any number of
 * threads share no lock. They should name different parts of the array: nothing
 * here keeps two threads from filling the same buffer.
 *
 * The addresses are those of the process that registered. In another one (after
 * fork(), or a descriptor that was passed on) they mean something else: a receive
 * there is refused with EXDEV. It can register an array of its own.
 */
#include <linux/mm_types.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/socket.h>
#include <linux/uaccess.h>
#include <linux/uio.h>

#include "manylane.h"

struct header {
	struct iov_iter buffers; /* all of them, nothing received yet */
	struct iovec one;	 /* what "buffers" points to, if it is one */
	struct iovec *more;	 /* the same, if it is several, or NULL */
	void __user *name;
	void __user *control;
	size_t control_len;
	int name_len;
};

struct ml_headers {
	struct kref users;
	struct mm_struct *mm; /* held as an identity, not its memory */
	struct manylane_result __user *results;
	u32 count;
	struct header header[];
};

static void free_headers(struct kref *users)
{
	struct ml_headers *headers =
		container_of(users, struct ml_headers, users);
	u32 i;

	for (i = 0; i < headers->count; i++)
		kfree(headers->header[i].more);
	mmdrop(headers->mm);
	kvfree(headers);
}

static int read_header(struct header *header, const struct mmsghdr __user *from)
{
	struct user_msghdr raw;
	ssize_t len;

	if (copy_from_user(&raw, &from->msg_hdr, sizeof(raw)))
		return -EFAULT;
	if (raw.msg_namelen < 0 || raw.msg_controllen > INT_MAX)
		return -EINVAL;
	if (raw.msg_iovlen > UIO_MAXIOV)
		return -EMSGSIZE;

	/* One is kept in place; for more, "more" becomes the array to be freed. */
	header->more = &header->one;
	len = import_iovec(ITER_DEST, raw.msg_iov, raw.msg_iovlen, 1,
			   &header->more, &header->buffers);
	if (len < 0) {
		header->more = NULL;
		return len;
	}
	header->name = raw.msg_name;
	header->name_len = raw.msg_name ? raw.msg_namelen : 0;
	header->control = raw.msg_control;
	header->control_len = raw.msg_control ? raw.msg_controllen : 0;
	return raw.msg_iovlen;
}

static struct ml_headers *read_headers(const struct manylane_register *args)
{
	const struct mmsghdr __user *from = u64_to_user_ptr(args->headers);
	struct ml_headers *headers;
	u32 segments = 0;
	int err = 0;

	headers = kvzalloc(struct_size(headers, header, args->count),
			   GFP_KERNEL_ACCOUNT);
	if (!headers)
		return ERR_PTR(-ENOMEM);
	kref_init(&headers->users);
	headers->mm = current->mm;
	mmgrab(headers->mm);
	headers->results = u64_to_user_ptr(args->results);
	while (headers->count < args->count) {
		err = read_header(&headers->header[headers->count],
				  &from[headers->count]);
		if (err < 0)
			break;
		headers->count++;
		segments += err;
		err = 0;
		if (segments > MANYLANE_SEGMENTS_MAX) {
			err = -E2BIG;
			break;
		}
		if (fatal_signal_pending(current)) {
			err = -EINTR;
			break;
		}
		cond_resched();
	}
	if (!err)
		return headers;
	kref_put(&headers->users, free_headers);
	return ERR_PTR(err);
}

static void replace(struct ml_socket *ml, struct ml_headers *by)
{
	struct ml_headers *old;

	spin_lock(&ml->headers_lock);
	old = ml->headers;
	ml->headers = by;
	spin_unlock(&ml->headers_lock);
	if (old)
		kref_put(&old->users, free_headers);
}

void ml_headers_forget(struct ml_socket *ml)
{
	replace(ml, NULL);
}

/* MANYLANE_REGISTER. A failed one leaves the one before. */
int ml_headers_register(struct ml_socket *ml, void __user *from)
{
	struct manylane_register args;
	struct ml_headers *headers = NULL;

	if (copy_from_user(&args, from, sizeof(args)))
		return -EFAULT;
	if (args.version != MANYLANE_VERSION || args.reserved[0] ||
	    args.reserved[1])
		return -EINVAL;
	if (args.count > MANYLANE_HEADERS_MAX)
		return -E2BIG;
	if (args.count) {
		headers = read_headers(&args);
		if (IS_ERR(headers))
			return PTR_ERR(headers);
	}
	replace(ml, headers);
	return 0;
}

static struct ml_headers *hold(struct ml_socket *ml)
{
	struct ml_headers *headers;

	spin_lock(&ml->headers_lock);
	headers = ml->headers;
	if (headers)
		kref_get(&headers->users);
	spin_unlock(&ml->headers_lock);
	return headers;
}

static int receive_one(struct socket *sock, const struct header *header,
		       struct manylane_result __user *to, int flags, bool first)
{
	struct sockaddr_storage name;
	struct manylane_result result = {};
	struct msghdr msg = {
		.msg_name = &name,
		.msg_iter = header->buffers,
		.msg_control_user = header->control,
		.msg_control_is_user = true,
		.msg_controllen = header->control_len,
		.msg_flags = flags & MSG_CMSG_CLOEXEC,
	};
	int len;

	/* As with recvmmsg(): the security module is asked once for all messages. */
	if (first)
		len = sock_recvmsg(sock, &msg, flags);
	else
		len = READ_ONCE(sock->ops)->recvmsg(sock, &msg,
						    msg_data_left(&msg), flags);
	if (len < 0)
		return len;
	if (header->name_len &&
	    copy_to_user(header->name, &name,
			 min(header->name_len, msg.msg_namelen)))
		return -EFAULT;
	result.len = len;
	result.namelen = msg.msg_namelen;
	result.flags = msg.msg_flags;
	result.controllen = header->control_len - msg.msg_controllen;
	return copy_to_user(to, &result, sizeof(result)) ? -EFAULT : 0;
}

/* MANYLANE_RECEIVE */
int ml_headers_receive(struct socket *sock, void __user *from)
{
	const u32 known =
		MSG_DONTWAIT | MSG_WAITFORONE | MSG_TRUNC | MSG_CMSG_CLOEXEC;
	struct ml_headers *headers;
	struct manylane_receive args;
	int err = 0, done = 0;
	u32 flags;

	if (copy_from_user(&args, from, sizeof(args)))
		return -EFAULT;
	if (args.reserved || args.flags & ~known)
		return -EINVAL;
	headers = hold(ml_of(sock->sk));
	if (!headers)
		return -ENOENT;
	if (headers->mm != current->mm)
		err = -EXDEV;
	else if (args.first > headers->count || !args.count ||
		 args.count > headers->count - args.first ||
		 args.count > INT_MAX)
		err = -EINVAL;
	if (err)
		goto out;

	flags = args.flags & ~MSG_WAITFORONE;
	if (sock->file->f_flags & O_NONBLOCK)
		flags |= MSG_DONTWAIT;
	while (done < args.count) {
		err = receive_one(sock, &headers->header[args.first + done],
				  &headers->results[args.first + done], flags,
				  !done);
		if (err)
			break;
		done++;
		if (args.flags & MSG_WAITFORONE)
			flags |= MSG_DONTWAIT;
		cond_resched();
	}
	/* As with recvmmsg(): the next call returns the error. */
	if (done && err && err != -EAGAIN)
		WRITE_ONCE(sock->sk->sk_err, -err);
out:
	kref_put(&headers->users, free_headers);
	return done ? done : err;
}
