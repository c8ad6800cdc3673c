#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash
#
# Far, one of the two machines that devices.sh starts: runs 'manylane send' with the options of each
# line that it reads, and answers with how many were asked, answered, answered wrongly and twice.

PATH=$PROGRAMS:$PATH
busybox modprobe virtio_net
for number in 0 1; do
  ip address add 10.77.$number.1/24 dev eth$number
  ip link set eth$number up
done
ip address add 10.77.3.1/24 dev eth0
echo READY
while IFS= read -r line; do
  # shellcheck disable=SC2086 # options
  manylane send $line --json 2>/tmp/error </dev/null |
    sed -n 's/.*"\(asked\|answered\|wrong\|duplicates\)": \([0-9]*\).*/\2/p' | xargs
done
busybox poweroff -f
