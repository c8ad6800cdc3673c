#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash disable=SC2094,SC2154 # a line is read and written; what the file sets
#
# First process of a virtual machine that lib.sh boots: puts the root of the host, and a layer in
# memory above it, in the place of its own, and becomes the script that the host wants to be run.

/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in virtio_pci virtiofs overlay; do modprobe -q $module; done

mount -t virtiofs host /host
mount -t tmpfs -o size=75% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /new
# shellcheck disable=SC1090
. "/host$vm_environment"
mount -o bind "/host$vm_out" "/new$vm_out"
for at in proc sys dev; do mount -o move /$at /new/$at; done
mount -t tmpfs -o mode=1777 tmp /new/tmp
mount -t tmpfs run /new/run
mkdir -p /new/dev/pts /new/dev/shm
mount -t devpts devpts /new/dev/pts
mount -t tmpfs -o mode=1777 shm /new/dev/shm
for link in fd: stdin:/0 stdout:/1 stderr:/2; do
  ln -s "/proc/self/fd${link#*:}" "/new/dev/${link%:*}"
done
mount -t cgroup2 cgroup /new/sys/fs/cgroup
# As systemd does: groups may have quotas.
echo +cpu >/new/sys/fs/cgroup/cgroup.subtree_control
mount -t bpf bpf /new/sys/fs/bpf
mount -t tracefs tracing /new/sys/kernel/tracing
if [ -n "$vm_modules" ]; then
  mkdir -p "/new/lib/modules/${vm_modules##*/}"
  mount -o bind "/host$vm_modules" "/new/lib/modules/${vm_modules##*/}"
fi
umount -l /host
# Of the kernel's own requests. Debian's is busybox where kmod is missing.
[ -e /new/sbin/modprobe ] || ln -s ../bin/busybox /new/usr/sbin/modprobe

# The loader of eBPF programs parses all types of the kernel that it finds here, and needs none: a
# second for each socket, by emulation.
mount -t tmpfs none /new/sys/kernel/btf
# Like services of Debian.
ulimit -n 524288
ulimit -l 8192
cd /new || exit
stty -F dev/ttyS1 raw -echo
exec <>dev/ttyS1 >dev/ttyS1 2>&1
exec switch_root /new /bin/sh "$vm_script"
