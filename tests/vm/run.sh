#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# The tier in a virtual machine: what needs another kernel, or a device that is
# no veth. KERNEL is a version of Debian's: 5.10, 6.1 or 6.12. The machine runs
# guest.sh, whose lines this reads: PASS, FAIL, SKIP, and HOST for what the host
# has to do, at the far end of the machine's network devices. With CPUS=8 it
# traces lanes instead (tests/tests/*_shared_lines.rs).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../../scripts/lib.sh"

kernel=${KERNEL:-6.1}
cpus=${CPUS:-2}
# Seconds. 64 traced lanes of engine xdp take 16 to 23 minutes.
limit=${VM_TIMEOUT:-$((cpus < 8 ? 900 : 2400))}
program=$(realpath "${MANYLANE:-$root/target/debug/manylane}")
library=$(dirname "$program")/libmanylane_preload.so
case $kernel in
5.10) suite=bullseye ;;
6.1) suite=bookworm ;;
6.12) suite=trixie ;;
*) die "KERNEL=$kernel: expected 5.10, 6.1 or 6.12" ;;
esac
is_root || die "the virtual machine needs root, for its network devices"

folder=$root/target/vm/$kernel
tree=$folder/tree # the machine's files
namespace=manylane-vm-$$
mkdir -p "$folder"

clean() {
  [ -z "${machine:-}" ] || kill "$machine" 2>/dev/null || true
  wait 2>/dev/null || true
  ip netns delete "$namespace" 2>/dev/null || true
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Debian's kernel of another release, by lists of its own: those of this machine stay as they are.
fetch_kernel() {
  local apt=$folder/apt options meta image
  mkdir -p "$apt"/lists/partial "$apt"/cache/archives/partial
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${MIRROR:-http://deb.debian.org/debian} $suite main" \
    >"$apt/sources.list"
  options=(-q -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o "Dir::Etc::sourcelist=$apt/sources.list"
    -o Dir::Etc::sourceparts=/dev/null -o APT::Architecture=amd64 -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update >"$apt/log" 2>&1 || die "no list of packages of $suite: $apt/log"
  meta=linux-image-cloud-amd64
  image=$(apt-cache "${options[@]}" depends "$meta" | sed -n 's/^ *Depends: \(linux-image-[^ ]*\).*/\1/p')
  [ -n "$image" ] || die "$suite has no $meta"
  (cd "$apt" && apt-get "${options[@]}" download "$image" >>log 2>&1) || die "$image was not fetched: $apt/log"
  rm -rf "$folder/image"
  dpkg-deb -x "$apt/$image"_*.deb "$folder/image.new"
  mv "$folder/image.new" "$folder/image"
  rm -f "$apt"/*.deb
}

# Valgrind, and the tests that trace lanes.
add_trace() {
  local file test
  for test in loopback_shared_lines netns_xdp_shared_lines; do
    file=$("${CARGO:-cargo}" test --package manylane-tests --test "$test" --no-run --message-format json 2>/dev/null |
      sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    [ -n "$file" ] || die "the tests were not built: cargo test --package manylane-tests --no-run"
    strip -o "$tree/bin/$test" "$file"
    linked+=("$tree/bin/$test")
  done
  for file in /usr/bin/valgrind{,.bin} /usr/libexec/valgrind/{default.supp,lackey-amd64-linux,vgpreload_core-amd64-linux.so}; do
    install -D "$file" "$tree$file"
  done
}

# The machine's files: programs of this one with their libraries, at the places where they are here.
make_tree() {
  local file modules programs linked=("$program" "$library")
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,proc,sys,dev,run,tmp,etc,lib/modules}
  programs=("$(command -v ip)" "$(command -v ethtool)")
  [ "$cpus" -lt 8 ] || add_trace
  for file in "${programs[@]}" $(ldd "${programs[@]}" "${linked[@]}" |
    sed -n 's/^\t\(.* => \)\?\(\/[^ ]*\) .*/\2/p' | sort -u); do
    install -D "$file" "$tree$file"
  done
  strip -o "$tree/bin/manylane" "$program"
  strip -o "$tree/bin/libmanylane_preload.so" "$library"
  cc -O1 -pthread -o "$tree/bin/server" "$root/crates/manylane-cli/tests/servers/server.c"
  install "$(command -v busybox)" "$tree/bin/busybox"
  install "$root/tests/vm/guest.sh" "$tree/init"
  modules=$(find "$folder/image" -path '*/lib/modules/*' -prune)
  cp -r "$modules" "$tree/lib/modules/"
  modules=$tree/lib/modules/${modules##*/}
  # What no test needs, by far the most.
  rm -rf "$modules"/kernel/{sound,fs} "$modules"/kernel/drivers/{gpu,scsi,infiniband,md,media,usb,hwmon,nvme,target}
  find "$modules" -name '*.xz' -exec busybox unxz {} +
  busybox depmod -b "$tree" "${modules##*/}"
  (cd "$tree" && find . | busybox cpio -o -H newc) >"$folder/initramfs" 2>"$folder/cpio.log"
}

# What the guest asks for: the line that it gets back.
host() {
  local inside=(ip netns exec "$namespace")
  case $1 in
  send) # OPTION...: as far() of guest.sh
    "${inside[@]}" "$program" "$@" --json 2>/dev/null | sed -n 's/.*"\(asked\|answered\|wrong\|duplicates\)": \([0-9]*\).*/\2/p' | xargs
    ;;
  partial) # DEVICE: whether the kernel leaves checksums to it, on or off
    "${inside[@]}" ethtool -k "$2" | sed -n 's/^.*tx-checksum-ip-generic: \([a-z]*\).*/\1/p'
    ;;
  esac
}

make_network() {
  local device number=0
  ip netns add "$namespace"
  for device in tap0 tap1; do
    ip -n "$namespace" tuntap add dev "$device" mode tap multi_queue vnet_hdr
    ip -n "$namespace" address add "10.77.$number.1/24" dev "$device"
    ip -n "$namespace" link set "$device" up
    number=$((number + 1))
  done
}

[ -e "$folder/image" ] || fetch_kernel
make_tree
make_network
tap() { echo "tap,id=$1,ifname=$1,script=no,downscript=no,vhost=off,queues=$2"; }
coproc VM {
  exec ip netns exec "$namespace" nice -n 5 timeout --foreground --kill-after=5 "$limit" qemu-system-x86_64 \
    -accel tcg,thread=multi -cpu max -smp "$cpus" -m 2048 -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$(echo "$folder"/image/boot/vmlinuz-*)" -initrd "$folder/initramfs" \
    -append "console=ttyS0 no_timer_check panic=-1 quiet ONLY=\"${ONLY:-}\"" \
    -serial "file:$folder/console.log" -serial stdio \
    -netdev "$(tap tap0 4)" \
    -device virtio-net-pci,netdev=tap0,mac=52:54:00:00:00:00,mq=on,vectors=10,romfile= \
    -netdev "$(tap tap1 4)" \
    -device virtio-net-pci,netdev=tap1,mac=52:54:00:00:00:01,mq=on,vectors=10,ctrl_guest_offloads=off,romfile= \
    -device vmxnet3,mac=52:54:00:00:00:02,romfile=
}
# shellcheck disable=SC2153
machine=$VM_PID
exec {from}<&"${VM[0]}" {to}>&"${VM[1]}"

passed=0 failed=0 skipped=0 done=
while IFS= read -r line <&"$from"; do
  line=${line%$'\r'}
  case $line in
  "HOST "*)
    read -ra words <<<"${line#HOST }"
    answer=$(host "${words[@]}" </dev/null) || answer="failed on the host: ${words[*]}"
    echo "$answer" >&"$to"
    continue
    ;;
  "PASS "*) passed=$((passed + 1)) ;;
  "FAIL "*) failed=$((failed + 1)) ;;
  "SKIP "*) skipped=$((skipped + 1)) ;;
  DONE) done=1 ;;
  esac
  echo "$line"
done
echo "Linux $kernel: $passed passed, $failed failed, $skipped skipped"
[ -n "$done" ] || die "the machine did not come to its end within $limit seconds: $folder/console.log"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
