#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Installs the tools that a build needs: setup.sh [fuzz] [ci] [vm] [kernel] [module]
#
# It only installs missing packages of Debian or Ubuntu, as root or with a sudo that asks for no
# password. If no package is missing, it prints nothing and runs nothing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

missing=()  # the build fails without these packages
optional=() # features are skipped without these packages

need() { # PACKAGE TEST...: TEST fails if PACKAGE is missing
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
want() {
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || optional+=("$package")
}

need gcc command -v cc
need libc6-dev test -e /usr/include/stdio.h
need ca-certificates test -e /etc/ssl/certs/ca-certificates.crt
# The testbed: without it only loopback can be measured.
want iproute2 command -v ip
for extra in "$@"; do
  case $extra in
  fuzz)
    # libFuzzer is C++ and is compiled by the build of the fuzz targets.
    need g++ command -v c++
    ;;
  ci)
    need clang-format command -v clang-format
    # To compile the eBPF programs again, and compare.
    need clang command -v "${CLANG:-clang}"
    need llvm command -v "${LLVM_STRIP:-llvm-strip}"
    need libbpf-dev test -e /usr/include/bpf/bpf_helpers.h
    need shellcheck command -v shellcheck
    need git command -v git
    # The servers of the tests of 'manylane run'.
    need memcached test -x /usr/bin/memcached
    need rsyslog test -x /usr/sbin/rsyslogd
    need kamailio test -x /usr/sbin/kamailio
    need nsd test -x /usr/sbin/nsd
    need knot test -x /usr/sbin/knotd
    need unbound test -x /usr/sbin/unbound
    need dnsperf test -x /usr/bin/dnsperf
    need knot-dnsutils test -x /usr/sbin/kxdpgun
    need python3 test -x /usr/bin/python3
    need nodejs test -x /usr/bin/node
    # Clients and servers of the tests of 'manylane proxy'; wrk is also the load of an experiment.
    need wrk test -x /usr/bin/wrk
    need curl test -x /usr/bin/curl
    need redis-server test -x /usr/bin/redis-server
    need redis-tools test -x /usr/bin/redis-cli
    need openssh-server test -x /usr/sbin/sshd
    need openssh-client test -x /usr/bin/ssh
    # Memory accesses of lanes.
    need valgrind command -v valgrind
    ;;
  vm)
    need qemu-system-x86 command -v qemu-system-x86_64
    # shellcheck disable=SC2016 # for that shell
    need busybox-static sh -c 'command -v busybox && ! ldd "$(command -v busybox)"'
    need iproute2 command -v ip
    need ethtool command -v ethtool
    ;;
  kernel)
    # To build one for the virtual machine.
    need make command -v make
    need bc command -v bc
    need bison command -v bison
    need flex command -v flex
    need patch command -v patch
    need xz-utils command -v xz
    need dwarves command -v pahole
    need libelf-dev test -e /usr/include/libelf.h
    ;;
  module)
    # To build kernel/ against headers of Debian: their compiler, and what their tools use.
    need make command -v make
    need gcc-12 command -v gcc-12
    need libelf1 test -e /usr/lib/x86_64-linux-gnu/libelf.so.1
    ;;
  *) die "setup.sh: unknown argument '$extra': expected fuzz, ci, vm, kernel or module" ;;
  esac
done

install() {
  local as_root=()
  is_root || as_root=(sudo -n)
  say "installing with apt: $*"
  local log
  log=$(mktemp)
  # shellcheck disable=SC2064 # now: the variable is gone by then
  trap "rm -f '$log'" EXIT
  # The lists of a fresh container are empty; elsewhere they may be too old to find a package.
  if "${as_root[@]}" apt-get update -q >"$log" 2>&1 &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -q --no-install-recommends "$@" >>"$log" 2>&1; then
    return 0
  fi
  tail -n 5 "$log" >&2
  return 1
}

may_install() {
  command -v apt-get >/dev/null && { is_root || sudo -n true 2>/dev/null; }
}

all=("${missing[@]}" "${optional[@]}")
if [ ${#all[@]} -gt 0 ]; then
  if may_install && install "${all[@]}"; then
    missing=()
    optional=()
  else
    say "missing packages: sudo apt-get install ${all[*]}"
  fi
fi
if [ ${#missing[@]} -gt 0 ]; then
  die "cannot build without these packages: ${missing[*]}"
fi
for package in "${optional[@]}"; do
  case $package in
  iproute2) say "without iproute2 there is no testbed of network namespaces: using loopback only" ;;
  esac
done

# The Rust toolchain is the one thing that is not ours to install.
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
command -v cargo >/dev/null ||
  die "cargo is missing: install Rust $wanted or later, from https://rustup.rs or your distribution"
found=$(cd "$root" && rustc --version | cut -d ' ' -f 2)
oldest=$(printf '%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)
[ "$oldest" = "$wanted" ] ||
  die "rustc $found is too old: the code needs $wanted or later (rustup update)"
