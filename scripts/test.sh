#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# All tests that this user may run; arguments go to cargo test.
#
# A test that cannot run here says why, in a line that it adds to the file
# named by MANYLANE_SKIPS; the lines are shown at the end with their count.
#
# With CI=true a few tests that failed among all others are tried a second time,
# alone: a machine that stood still for a minute is no reason to refuse a change.
# The last lines name them, because each is a defect of a test or of the code.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

cd "$root"
mkdir -p target
export MANYLANE_SKIPS=${MANYLANE_SKIPS:-$root/target/skips.txt}
log=$root/target/test.log
: >"$MANYLANE_SKIPS"

if ! is_root; then
  say "not root: the netns tier is left out (network namespaces, veth pairs, eBPF);"
  say "for all tiers run 'make test' as root"
fi

# Half an hour is far more than it takes: a test that hangs in CI ends here, not
# never. At a terminal Ctrl-C does the same, and only without a timeout between.
limit=${TEST_TIMEOUT:-1800}
bound=()
[ -t 1 ] || bound=(timeout --kill-after=10 "$limit")
status=0
"${bound[@]}" cargo test --workspace --no-fail-fast "$@" 2>&1 | tee "$log" || status=$?
[ "$status" -ne 124 ] || say "the tests did not end within $limit seconds"

most_tried_again=3
second_try=()

# The names under the second "failures:" of each test program's output.
failed_tests() {
  awk '
    /^failures:$/ { list = 1; next }
    list && /^    [^ ]/ { print $1; next }
    /^---- / || /^test result:/ { list = 0 }
  ' "$log" | sort -u
}

# Tries what failed again, target by target as cargo named them at the end.
# A target that ended without the names of its failures (a crash, a timeout, a
# documentation test) finds no test to try, and stays failed.
try_again() {
  local targets target again
  mapfile -t second_try < <(failed_tests)
  [ ${#second_try[@]} -ge 1 ] && [ ${#second_try[@]} -le $most_tried_again ] || return 1
  # shellcheck disable=SC2016 # cargo's own quotes
  mapfile -t targets < <(sed -n 's/^    `\(-.*\)`$/\1/p' "$log")
  [ ${#targets[@]} -ge 1 ] || return 1
  for target in "${targets[@]}"; do
    say "a second try, alone: ${second_try[*]} ($target)"
    again=$root/target/test-again.log
    # shellcheck disable=SC2086 # several words
    timeout --kill-after=10 600 cargo test $target -- --exact --test-threads=1 "${second_try[@]}" 2>&1 |
      tee "$again" || return 1
    grep -qE '^test result: ok\. [1-9]' "$again" || return 1
  done
}

tried_again=
if [ "${CI:-}" = true ] && [ "$status" -ne 0 ] && [ "$status" -ne 124 ] && try_again; then
  status=0
  tried_again=$(printf ', %d of the failed passed at a second try: %s' ${#second_try[@]} "${second_try[*]}")
fi

skips=$(grep -c . "$MANYLANE_SKIPS" || true)
echo
echo "skipped here: $skips"
sort -u "$MANYLANE_SKIPS" | sed 's/^/  /'

# One line for all test programs, in the words of each one's own summary. The
# skips ran as tests that returned at once, so they are among the passed ones.
awk -v skips="$skips" -v again="$tried_again" '
  /^test result:/ {
    for (i = 2; i < NF; i++) {
      if ($(i + 1) ~ /^passed/) passed += $i
      if ($(i + 1) ~ /^failed/) failed += $i
    }
  }
  END { printf "total: %d passed, %d failed, %d skipped%s\n", passed - skips, failed, skips, again }
' "$log" | tee "$root/target/test-total.txt"
exit "$status"
