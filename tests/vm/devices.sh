#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Engine xdp on devices that are no veth: KERNEL is a version of Debian's kernel, ONLY a part of the
# names of checks. Two virtual machines, near and far, are joined by bridges of this one:
#
#   wire0   eth0 of near: virtio_net                    eth0 of far: virtio_net
#           eth3 of near: e1000e
#   wire1   eth1 of near: virtio_net that cannot ask    eth1 of far: virtio_net
#           its host to finish checksums
#
# eth2 of near is a vmxnet3 without anything behind it. Near runs devices-guest.sh, whose lines this
# script reads: PASS, FAIL, SKIP, HOST for what this machine has to answer, and FAR for what far has
# to, where devices-far.sh runs.
set -euo pipefail
# shellcheck source=tests/vm/lib.sh
. "$(dirname "$0")/lib.sh"

kernel=${KERNEL:-6.1}
program=$(realpath "${MANYLANE:-$root/target/debug/manylane}")
is_root || die "the virtual machines need root, for their network devices"
# With the drivers of hardware.
use_kernel "$kernel-full"

# What near asks this machine: the line that it gets back.
host() {
  case $1 in
  partial) # DEVICE: whether the kernel leaves checksums to it, on or off
    "${inside[@]}" ethtool -k "$2" | sed -n 's/^.*tx-checksum-ip-generic: \([a-z]*\).*/\1/p'
    ;;
  esac
}

boot_machines() {
  local mac=52:54:00:00:00 device=() near=() far=()
  make_network wire0 wire1
  add_device near0 wire0 virtio-net-pci $mac:00 4 ,rss=on
  near+=("${device[@]}")
  add_device near1 wire1 virtio-net-pci $mac:01 4 ,ctrl_guest_offloads=off
  near+=("${device[@]}" -device "vmxnet3,mac=$mac:02,romfile=")
  add_device near3 wire0 e1000e $mac:03 1
  near+=("${device[@]}")
  add_device far0 wire0 virtio-net-pci $mac:10 4
  far+=("${device[@]}")
  add_device far1 wire1 virtio-net-pci $mac:11 4
  far+=("${device[@]}")
  mkdir -p "$folder/out"
  cc -O1 -pthread -o "$folder/out/server" "$root/crates/manylane-cli/tests/servers/server.c"
  local variables=(PROGRAMS="${program%/*}:$folder/out" MAC="$mac" ONLY="${ONLY:-}")
  boot far 2 1G 1800 "$root/tests/vm/devices-far.sh" "${variables[@]}" -- "${far[@]}"
  boot near 2 2G 1800 "$root/tests/vm/devices-guest.sh" "${variables[@]}" -- "${near[@]}"
}

answer() { echo "$*" >&"${to[near]}"; }

boot_machines
read -r line <&"${from[far]}"
[ "$line" = $'READY\r' ] || [ "$line" = READY ] || die "far did not start: $line ($folder/far.console)"
passed=0 failed=0 skipped=0 ended=''
while IFS= read -r line <&"${from[near]}"; do
  line=${line%$'\r'}
  case $line in
  "HOST "*)
    read -ra words <<<"${line#HOST }"
    answer "$(host "${words[@]}" </dev/null)"
    continue
    ;;
  "FAR "*)
    echo "${line#FAR }" >&"${to[far]}"
    IFS= read -r line <&"${from[far]}" || line="far has ended"
    answer "$line"
    continue
    ;;
  "PASS "*) passed=$((passed + 1)) ;;
  "FAIL "*) failed=$((failed + 1)) ;;
  "SKIP "*) skipped=$((skipped + 1)) ;;
  DONE) ended=1 ;;
  esac
  echo "$line"
done
echo "Linux $kernel: $passed passed, $failed failed, $skipped skipped"
[ -n "$ended" ] || die "the machine did not come to its end: $folder/near.console"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
