#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# The tests of the kernel module (kernel/): KERNEL is 6.1 or 6.12, both of Debian 12, or debug, the
# one that kernel.sh builds. ONLY is a part of the names of tests, SECONDS_OF_STRESS how long random
# calls are made after them, SEED which. Builds the module against that kernel, and runs
# module-guest.sh, whose lines this reads: PASS, FAIL, SKIP, and DONE at its end.
set -euo pipefail
# shellcheck source=tests/vm/lib.sh
. "$(dirname "$0")/lib.sh"

kernel=${KERNEL:-6.1}
is_root || die "the virtual machine needs root, to see the files of this one"

# Headers are needed beside the kernel, and their tools run here. So 6.12 is the one that was built
# for the release with 6.1.
use_kernel_and_headers() { # SUITE
  local apt release packages
  folder=$root/target/vm/module-$kernel apt=$folder/apt
  [ -d "$folder/modules" ] || fetch_kernel "$1" linux-image-cloud-amd64
  kernel_image=$(echo "$folder"/image/boot/vmlinuz-*)
  kernel_modules=$(echo "$folder"/modules/lib/modules/*)
  release=${kernel_modules##*/}
  headers=$folder/headers/usr/src/linux-headers-$release
  pack_initramfs
  [ ! -d "$folder/headers" ] || return 0
  mapfile -t packages < <(depends "$apt" "linux-headers-$release" | sed -n '/^linux-\(headers\|kbuild\)-/p')
  download "$apt" "linux-headers-$release" "${packages[@]}"
  for package in "$apt"/*.deb; do
    dpkg-deb -x "$package" "$folder/headers.new"
    rm "$package"
  done
  # They name each other by where they would be installed.
  sed -i "s,^include /usr/src,include $folder/headers/usr/src," "$folder/headers.new/usr/src/linux-headers-$release/Makefile"
  mv "$folder/headers.new" "$folder/headers"
}

case $kernel in
6.1) use_kernel_and_headers bookworm ;;
6.12) use_kernel_and_headers bookworm-backports ;;
debug)
  use_kernel debug
  headers=$folder/linux
  ;;
*) die "KERNEL=$kernel: expected 6.1, 6.12 or debug" ;;
esac

build_module "$headers" SELFTEST=1
cc -O1 -g -Wall -Wextra -pthread -o "$folder/module/module-test" "$folder"/module/tests/*.c

boot module "${CPUS:-4}" 2G "${VM_TIMEOUT:-1800}" "$root/tests/vm/module-guest.sh" \
  MODULE="$folder/module" ONLY="${ONLY:-}" STRESS="${SECONDS_OF_STRESS:-20}" SEED="${SEED:-$RANDOM}" --
passed=0 failed=0 skipped=0 ended=''
while IFS= read -r line <&"${from[module]}"; do
  line=${line%$'\r'}
  case $line in
  "PASS "*) passed=$((passed + 1)) ;;
  "FAIL "*) failed=$((failed + 1)) ;;
  "SKIP "*) skipped=$((skipped + 1)) ;;
  DONE) ended=1 ;;
  esac
  [ "$line" = DONE ] || echo "$line"
done
echo "Linux $kernel: $passed passed, $failed failed, $skipped skipped"
[ -n "$ended" ] || die "the machine ended too early: $folder/module.console"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
