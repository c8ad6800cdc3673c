#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# In the virtual machine that module.sh starts: loads the module of $MODULE, runs its tests, makes
# random calls for $STRESS seconds, unloads it, and asks the kernel what it has to complain about.

busybox ip link set lo up
echo "Linux $(uname -r), $(busybox nproc) CPUs"
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
leaks=/sys/kernel/debug/kmemleak

is() { # WHAT COMMAND...: a test that succeeds with the command
  what=$1
  shift
  if "$@"; then echo "PASS $what"; else echo "FAIL $what"; fi
}

is "the module is loaded" busybox insmod "$MODULE/manylane.ko"
is "the module has tested itself" sh -c 'dmesg | grep -q "manylane: self-test passed"'
"$MODULE/module-test" "$ONLY"
if [ -z "$ONLY" ]; then
  is "random calls for $STRESS seconds, seed $SEED" "$MODULE/module-test" stress "$STRESS" "$SEED"
  is "the module is unloaded" busybox rmmod manylane
  is "the module is loaded again" busybox insmod "$MODULE/manylane.ko"
fi
is "the module is unloaded at the end" busybox rmmod manylane

if [ -e $leaks ]; then
  # What was freed a moment ago may still be in a register: a leak is found twice.
  for _ in 1 2; do
    sleep 6
    echo scan >$leaks
  done
  cat $leaks
  is "no leaks of memory" sh -c "[ -z \"\$(cat $leaks)\" ]"
fi
# It turns itself off at the first error, and when its tables are full.
[ ! -e /proc/lockdep_stats ] || is "lockdep has checked until the end" grep -q "debug_locks: *1" /proc/lockdep_stats
complaints() { dmesg | grep -E "(^|] )(BUG:|WARNING: |Call Trace|general protection|Oops|UBSAN|INFO: |ODEBUG:)"; }
complaints | sed 's/^/FAIL the kernel complains: /'
echo "WARNING: to see that complaints are found" >/dev/kmsg
complaints >/dev/null || echo "FAIL complaints of the kernel are not found"
echo DONE
busybox poweroff -f
