#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Runs all tests that this user can run. Arguments go to cargo test.
#
# A test that cannot run adds a line with the reason to the file of MANYLANE_SKIPS. The lines are
# printed at the end, with their number.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

cd "$root"
mkdir -p target
export MANYLANE_SKIPS=${MANYLANE_SKIPS:-$root/target/skips.txt}
log=$root/target/test.log
: >"$MANYLANE_SKIPS"

if ! is_root; then
  say "not root: skipping the netns tier (network namespaces, veth pairs, eBPF);"
  say "for all tiers run 'make test' as root"
fi

# Files that tests leave behind by mistake.
temporary_files() {
  { find "${TMPDIR:-/tmp}" /dev/shm -maxdepth 1 -name 'manylane-*' 2>/dev/null || true; } | sort
}
before=$(temporary_files)

# Half an hour is far more than the tests take: it ends a test that hangs in CI. At a terminal
# Ctrl-C does the same, but only without timeout.
limit=${TEST_TIMEOUT:-1800}
bound=()
[ -t 1 ] || bound=(timeout --kill-after=10 "$limit")
# Started by nohup or in the background of a script, some signals are ignored, and
# so they would be in every program under test.
if env --default-signal true 2>/dev/null; then
  bound+=(env --default-signal)
fi
# Most tests wait most of the time: more of them at once than CPUs.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((2 * $(nproc)))}
status=0
"${with_script[@]}" "${bound[@]}" cargo test --workspace --no-fail-fast "$@" 2>&1 | tee "$log" || status=$?
[ "$status" -ne 124 ] || say "timeout: the tests did not end within $limit seconds"

left=$(comm -13 <(printf '%s\n' "$before") <(temporary_files))
if [ -n "$left" ]; then
  say "the tests left files behind:"
  printf '%s\n' "$left" >&2
  [ "$status" -ne 0 ] || status=1
fi

skips=$(grep -c . "$MANYLANE_SKIPS" || true)
echo
echo "skipped: $skips"
sort -u "$MANYLANE_SKIPS" | sed 's/^/  /'

echo "total: $(total "$log" "$skips")" | tee "$root/target/test-total.txt"
exit "$status"
