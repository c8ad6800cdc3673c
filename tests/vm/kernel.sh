#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Builds a kernel for virtual machines from Debian's source: kernel.sh FLAVOUR. The flavour is one
# of kernel/: its options are added to kernel/base.config, and FLAVOUR.patch, if there is one, is
# applied.
#
#   lock-stat  counts acquisitions and hold times of locks
#   debug      finds errors of kernel modules: KASAN, lockdep, kmemleak
#
# The result is target/vm/FLAVOUR/linux: arch/x86/boot/bzImage, and a tree against which modules can
# be built (make -C target/vm/FLAVOUR/linux M=...). It takes about 20 minutes of two busy CPUs, and
# 3 GB; JOBS are compilers at a time. As long as nothing in kernel/ changes, a second call does
# nothing. For a newer source, remove target/vm/linux-source and target/vm/FLAVOUR.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/../../scripts/lib.sh"
# shellcheck source=tests/vm/apt.sh
. "$(dirname "$0")/apt.sh"

suite=trixie
package=linux-source-6.12
flavour=${1:-}
parts=$root/tests/vm/kernel
case $flavour in
lock-stat | debug) ;;
*) die "kernel.sh '$flavour': expected lock-stat or debug" ;;
esac
source=$root/target/vm/linux-source
folder=$root/target/vm/$flavour
tree=$folder/linux
inputs=("$parts/base.config" "$parts/$flavour.config")
[ ! -e "$parts/$flavour.patch" ] || inputs+=("$parts/$flavour.patch")

fetch_source() {
  list_packages "$suite" "$source"
  download "$source" "$package"
}

# The source of that version, with the patch. It is kept if only options change.
unpack() { # DEB VERSION
  local source_key patch=$parts/$flavour.patch
  source_key="$2 $([ ! -e "$patch" ] || sha256sum <"$patch")"
  [ "$(cat "$folder/source" 2>/dev/null)" != "$source_key" ] || return 0
  rm -rf "$folder/source" "$tree" "$folder/unpacked"
  mkdir -p "$folder/unpacked"
  dpkg-deb --fsys-tarfile "$1" | tar -xO "./usr/src/$package.tar.xz" | tar -xJ -C "$folder/unpacked"
  [ ! -e "$patch" ] || patch -s -d "$folder/unpacked/$package" -p1 <"$patch"
  mv "$folder/unpacked/$package" "$tree"
  rmdir "$folder/unpacked"
  echo "$source_key" >"$folder/source"
}

configure() {
  local line
  cat "$parts/base.config" "$parts/$flavour.config" >"$tree/wanted.config"
  make -C "$tree" KCONFIG_ALLCONFIG=wanted.config allnoconfig >"$folder/build.log" 2>&1 ||
    die "the kernel was not configured: $folder/build.log"
  # An option whose conditions are not met is silently off.
  while IFS= read -r line; do
    case $line in
    CONFIG_* | "# CONFIG_"*) grep -qxF "$line" "$tree/.config" || die "the kernel does not accept $line" ;;
    esac
  done <"$tree/wanted.config"
}

debs() { find "$source" -maxdepth 1 -name "${package}_*.deb" 2>/dev/null; }
hash=$(cat "${inputs[@]}" | sha256sum | cut -d ' ' -f 1)
mkdir -p "$folder"
# One build at a time; the others wait for it.
exec {lock}>"$folder/lock"
flock "$lock"
[ "$(cut -d ' ' -f 3 "$folder/built" 2>/dev/null)" != "$hash" ] || exit 0
"$root/scripts/setup.sh" kernel
[ -n "$(debs)" ] || fetch_source
deb=$(debs | sort -V | tail -n 1)
version=${deb##*"${package}"_} version=${version%_all.deb}
rm -f "$folder/built"
unpack "$deb" "$version"
configure
say "building Linux $version, $flavour: $folder/build.log"
nice -n 10 make -C "$tree" -j "${JOBS:-2}" bzImage modules >>"$folder/build.log" 2>&1 ||
  die "the kernel was not built: $folder/build.log"
echo "$flavour $version $hash" >"$folder/built"
