#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Tests under sanitizers: sanitize.sh [address] [thread]
#
# Runs the unit tests and the loopback tier of the library, and the C programs of the preload
# library's tests. A sanitizer that this machine lacks is skipped, with the reason.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

cd "$root"
sanitizers=("$@")
[ ${#sanitizers[@]} -gt 0 ] || sanitizers=(address)
target=$(uname -m)-unknown-linux-gnu
# The tests of a tier take minutes; one that hangs ends here.
limit=${TEST_TIMEOUT:-3600}
export RUSTUP_TOOLCHAIN=nightly CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0
# A skip because of a sanitizer is none that a CI has to allow.
unset CI
failed=()
totals=()

lacking() { # SANITIZER RUNTIME: prints what the machine lacks
  if ! cargo --version >/dev/null 2>&1; then
    echo "no nightly toolchain (rustup toolchain install nightly --component rust-src)"
  elif [ ! -e "$2" ]; then
    echo "no nightly toolchain with ${2##*/}"
  # The standard library is built for this one alone.
  elif [ "$1" = thread ] && [ ! -e "$(rustc --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock" ]; then
    echo "no nightly toolchain with rust-src (rustup component add rust-src --toolchain nightly)"
  elif ! command -v clang >/dev/null; then
    echo "no clang"
  fi
}

# No program can start a symbolizer, which would get the preload library, too.
symbolize() {
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line"
    if [[ $line =~ ^\ +#[0-9].*\(([^\ ]+)\+(0x[0-9a-f]+)\) ]]; then
      addr2line -Cfpie "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" | sed 's/^/        /' || true
    fi
  done
}

# Runs the tests of a tier. The reports go to files: no test sees those of the programs that it
# starts.
tier() { # NAME ARGUMENTS...: of cargo test
  local name="$MANYLANE_SANITIZER, $1" start=$SECONDS status=0
  shift
  say "$name"
  rm -rf "$folder/reports"
  mkdir -p "$folder/reports"
  : >"$MANYLANE_SKIPS"
  "${with_script[@]}" timeout --kill-after=10 "$limit" cargo test --locked --no-fail-fast --target "$target" "${standard_library[@]}" "$@" 2>&1 |
    tee "$folder/test.log" || status=$?
  sort -u "$MANYLANE_SKIPS"
  # A thread that had no CPU when leaks were looked for. If any were found, there is more.
  local warning='^(==[0-9]+==Running thread [0-9]+ was not suspended\. False leaks are possible\.)?$' report
  for report in "$folder"/reports/*; do
    if [ -e "$report" ] && ! grep -Evq "$warning" "$report"; then
      cat "$report"
      rm "$report"
    fi
  done
  if [ -n "$(ls "$folder/reports")" ]; then
    cat "$folder"/reports/* | symbolize
    status=1
  fi
  [ "$status" -eq 0 ] || failed+=("$name")
  totals+=("$name: $(total "$folder/test.log" "$(grep -c . "$MANYLANE_SKIPS" || true)"), $((SECONDS - start)) s")
}

sanitize() { # SANITIZER
  folder=$root/target/$1-sanitizer
  standard_library=()
  export CARGO_TARGET_DIR=$folder RUSTFLAGS=-Zsanitizer=$1
  export MANYLANE_SANITIZER=$1 MANYLANE_SANITIZER_RUNTIME=$2 MANYLANE_SKIPS=$folder/skips.txt
  local common='symbolize=0:stack_trace_format="    #%n (%m+%o)"' signal
  export ASAN_OPTIONS=$common:log_path=$folder/reports/asan
  # Programs in C end without a word to their threads, and children of theirs start some.
  export TSAN_OPTIONS=$common:log_path=$folder/reports/tsan:report_thread_leaks=0:die_after_fork=0
  # ThreadSanitizer would set its handlers through the preload library before the checks in that can
  # run.
  for signal in segv sigbus sigfpe sigill sigtrap abort; do
    TSAN_OPTIONS+=:handle_$signal=0
  done
  # What the standard library's locks and channels order has to be seen.
  if [ "$1" = thread ]; then
    standard_library=(-Zbuild-std)
    RUSTFLAGS+=" --cfg manylane_tsan"
  fi
  tier "library" --package manylane-sys --package manylane-policy --package manylane-ipc --package manylane --lib
  tier "loopback" --package manylane-tests --test 'loopback*'
  # ThreadSanitizer's detector of deadlocks hangs when a thread holds more than 128 locks: each
  # liveness slot of a thread (liveness.rs) is one, and a test has them all.
  TSAN_OPTIONS+=:detect_deadlocks=0
  tier "preload library" --package manylane-preload
}

for sanitizer in "${sanitizers[@]}"; do
  case $sanitizer in
  address) runtime=asan ;;
  thread) runtime=tsan ;;
  *) die "sanitize.sh: unknown sanitizer '$sanitizer': expected address or thread" ;;
  esac
  runtime=$(rustc --print target-libdir --target "$target" 2>/dev/null || true)/librustc-nightly_rt.$runtime.a
  why=$(lacking "$sanitizer" "$runtime")
  if [ -n "$why" ]; then
    totals+=("$sanitizer: left out, $why")
  else
    sanitize "$sanitizer" "$runtime"
  fi
done

echo
printf '%s\n' "${totals[@]}"
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
