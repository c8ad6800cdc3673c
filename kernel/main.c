// SPDX-License-Identifier: GPL-2.0-only
/*
 * manylane.ko: a UDP socket with one receive queue for each processor behind one
 * descriptor, and remembered message headers. This file has the beginning and
 * the end of the module, and its device, through which sockets are attached.
 */
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/net.h>
#include <linux/uaccess.h>

#include "manylane.h"

static long device_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct manylane_attach args;
	struct socket *sock;
	int err;

	if (cmd != MANYLANE_ATTACH)
		return -ENOTTY;
	if (copy_from_user(&args, (void __user *)arg, sizeof(args)))
		return -EFAULT;
	if (args.version != MANYLANE_VERSION || args.reserved[0] ||
	    args.reserved[1])
		return -EINVAL;
	sock = sockfd_lookup(args.fd, &err);
	if (!sock)
		return err;
	err = ml_attach(sock, args.policy, args.queues);
	sockfd_put(sock);
	return err;
}

static const struct file_operations device_operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = device_ioctl,
	/* Its structure has the same layout for programs of 32 bits. */
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "manylane",
	.fops = &device_operations,
	/* Attaching is new code in the path of a socket: the administrator decides. */
	.mode = 0600,
};

static int __init manylane_init(void)
{
	int err;

	err = ml_attach_init();
	if (err)
		return err;
	err = ml_selftest();
	if (err)
		goto out;
	err = misc_register(&device);
	if (err)
		goto out;
	return 0;
out:
	ml_attach_exit();
	return err;
}

static void __exit manylane_exit(void)
{
	misc_deregister(&device);
	ml_attach_exit();
}

module_init(manylane_init);
module_exit(manylane_exit);
MODULE_DESCRIPTION(
	"UDP sockets with a receive queue for each processor, and remembered message headers");
MODULE_AUTHOR("The Manylane authors");
MODULE_LICENSE("GPL");
