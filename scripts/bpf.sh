#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Compiles bpf/*.bpf.c into bpf/objects, which is in the repository so that a
# build needs no clang: bpf.sh [--check]
#
# --check compares the results with bpf/objects instead. They depend on the version
# of clang: another version than that of the objects compares nothing, which is a
# failure in CI.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

clang=${CLANG:-clang}
strip=${LLVM_STRIP:-llvm-strip}
for program in "$clang" "$strip"; do
  command -v "$program" >/dev/null || die "$program is missing: apt-get install clang llvm libbpf-dev, or set CLANG and LLVM_STRIP"
done
cd "$root/bpf"
version=$("$clang" --version | head -n 1)
objects=$root/bpf/objects
if [ "${1:-}" = --check ]; then
  recorded=$(cat objects/COMPILER)
  if [ "$recorded" != "$version" ]; then
    say "not compared: bpf/objects was compiled by $recorded, but this is $version"
    [ "${CI:-}" != true ] || die "CI has to compare: set CLANG to that version, or make bpf with this one"
    exit 0
  fi
  objects=$(mktemp -d)
  trap 'rm -rf "$objects"' EXIT
fi
mkdir -p "$objects"
# Of the headers in /usr/include only layouts are used, which are the same on
# all architectures; asm/types.h is in a folder of the machine's own.
for source in *.bpf.c; do
  object=$objects/${source%.c}.o
  "$clang" -target bpf -mcpu=v3 -O2 -g -Wall -Wextra -Werror -I../abi "-I/usr/include/$(uname -m)-linux-gnu" \
    -ffile-compilation-dir=bpf -c "$source" -o "$object"
  # BTF is kept; DWARF is not needed.
  "$strip" --strip-debug "$object"
done
if [ "$objects" = "$root/bpf/objects" ]; then
  echo "$version" >objects/COMPILER
  sha256sum -- *.c *.h ../abi/manylane_abi.h >objects/SOURCES
  exit 0
fi
failed=0
for object in "$objects"/*.o; do
  cmp "$object" "objects/${object##*/}" || failed=1
done
[ "$failed" -eq 0 ] || die "bpf/objects differs from its sources: run 'make bpf'"
