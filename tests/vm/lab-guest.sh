#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# In the virtual machine that lab.sh starts: runs 'manylane lab $LAB', whose report and output go to
# the folder $OUT of the host.

ip link set lo up
[ -z "$MODULE" ] || busybox insmod "$MODULE" || echo "the module cannot be loaded: $MODULE"
echo "Linux $(uname -r), $(nproc) CPUs: manylane lab $LAB"
# shellcheck disable=SC2086 # a list of arguments
"$MANYLANE" lab $LAB --out "$OUT" >"$OUT/lab.txt" 2>"$OUT/lab.err" </dev/null
status=$?
cat "$OUT/lab.err"
dmesg | grep -E "] (BUG:|WARNING: |Call Trace|general protection)" | sed 's/^/the kernel complains: /'
echo "STATUS $status"
busybox poweroff -f
