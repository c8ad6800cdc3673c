#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# In the virtual machine that kernels.sh starts: runs the test programs of the list $TESTS, each a
# line: its folder, a tab, its file. $FILTER are arguments for each, and $LOG gets what they print.

ip link set lo up
# What udev would load or make nodes for, and what tests at once would load (busybox fails then).
for module in virtio_net tun veth; do
  busybox modprobe $module
done
# An emulated CPU may pause for long: what other CPUs queue for it is not to be dropped.
echo 30000 >/proc/sys/net/core/netdev_max_backlog
echo "Linux $(uname -r), $(nproc) CPUs"
tab=$(printf '\t')
while IFS=$tab read -r folder program; do
  name=$(basename "${program%-*}")
  log=$LOG.$name
  cd "$folder" || exit
  # shellcheck disable=SC2086 # a list of arguments
  timeout --kill-after=10 "$LIMIT" "$program" $FILTER >"$log" 2>&1 </dev/null
  status=$?
  [ $status -ne 124 ] || echo "FAIL $name: not within $LIMIT seconds"
  grep -q "^test result:" "$log" || echo "FAIL $name: ended with $status before its last test"
  failed=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/FAIL \1/p' "$log")
  # With --nocapture, the result of a test stands on a line of its own.
  [ $status -eq 0 ] || echo "${failed:-FAIL $name: ended with $status}"
  sed -n "/: ok. 0 passed;/d; s/^test result: [^ ]* \(.*\) passed; \(.*\) failed; .* finished in \(.*\)s$/RAN $name: \1 passed, \2 failed, \3 s/p" "$log"
  cat "$log" >>"$LOG"
  rm "$log"
done <"$TESTS"
# A veth device may leave the number of the sender's queue in a frame; where RPS is on, the kernel
# takes that for the receiver's, and warns once if it has fewer.
dmesg | grep -E "] ([a-z]+: )?(BUG|WARNING|INFO|Oops|general protection)" | grep -v get_rps_cpu |
  sed 's/^/FAIL the kernel complains: /'
echo DONE
busybox poweroff -f
