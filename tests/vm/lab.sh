#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# 'manylane lab' in a virtual machine: by default the locks of paper rivera, on a kernel that counts
# their acquisitions (kernel.sh), with eight CPUs. LAB are the arguments of 'manylane lab', CPUS the
# number of CPUs, KERNEL the kernel, and REPORT the folder that gets the report. Emulation distorts
# all times: only counts, and their ratios, can be compared with those of another machine.
set -euo pipefail
# shellcheck source=tests/vm/lib.sh
. "$(dirname "$0")/lib.sh"

lab=${LAB:-rivera --parts locks --units 2000}
cpus=${CPUS:-8}
limit=${VM_TIMEOUT:-5400} # seconds
report=${REPORT:-$root/report}
program=$(realpath "${MANYLANE:-$root/target/release/manylane}")
is_root || die "the virtual machine needs root, to see the files of this one"

use_kernel "${KERNEL:-lock-stat}"
# With the kernel module, for its rows.
module=
if [ -d "$folder/linux" ]; then
  build_module "$folder/linux"
  module=$folder/module/manylane.ko
fi
rm -rf "$folder/out"
boot lab "$cpus" 4G "$limit" "$root/tests/vm/lab-guest.sh" \
  MANYLANE="$program" LAB="$lab" MODULE="$module" OUT="$folder/out" --
status=''
while IFS= read -r line <&"${from[lab]}"; do
  line=${line%$'\r'}
  case $line in
  "STATUS "*) status=${line#STATUS } ;;
  *) say "$line" ;;
  esac
done
mkdir -p "$report"
cp -r "$folder/out/." "$report/"
[ -n "$status" ] || die "the machine did not come to its end within $limit seconds: $folder/lab.console"
cat "$report/lab.txt"
say "report: $report"
exit "$status"
