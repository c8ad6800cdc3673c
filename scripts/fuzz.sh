#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Fuzzes each target for a number of seconds: fuzz.sh SECONDS [TARGET...]
#
# New inputs stay in the target folder, and the corpus in the repository is not changed. An input
# that breaks a target is saved below fuzz/artifacts, and its path is printed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

seconds=${1:?fuzz.sh SECONDS [TARGET...]}
shift
cd "$root/fuzz"
cargo fuzz --version >/dev/null 2>&1 || die "cargo-fuzz is missing: cargo install cargo-fuzz"
RUSTUP_TOOLCHAIN=nightly cargo --version >/dev/null 2>&1 || die "the nightly toolchain is missing: rustup toolchain install nightly"
export RUSTUP_TOOLCHAIN=nightly
found=${CARGO_TARGET_DIR:-$root/target/fuzz}/found
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo fuzz list)

# Ends cargo and the fuzzer together. At a terminal Ctrl-C does the same, and only without a
# timeout between.
bound=()
[ -t 1 ] || bound=(timeout --kill-after=10 $((seconds + 3600)))
failed=()
for target in "${targets[@]}"; do
  mkdir -p "$found/$target"
  say "fuzzing $target for $seconds s"
  # At most 4 KiB: no frame and no message of ours is longer, and short ones are faster.
  "${with_script[@]}" "${bound[@]}" cargo fuzz run "$target" "$found/$target" "corpus/$target" -- \
    -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 -verbosity=0 || failed+=("$target")
done
[ ${#failed[@]} -eq 0 ] || die "failed targets: ${failed[*]}"
