#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# The tests on other kernels, in virtual machines: KERNEL is one or more of Debian's, CPUS the
# numbers of CPUs of the machines, TIER one or more of
#
#   unit, loopback, netns   as in CONTRIBUTING.md, without
#   virtio                  the functional suite of engine xdp between two virtio_net devices, on
#                           more CPUs than 3
#   programs                the tests of the command line, 'manylane run' and the benchmarks
#   trace                   lanes of each engine under Valgrind: half an hour on 8 CPUs
#
# ONLY is a part of the names of tests, to run these instead.
set -euo pipefail
# shellcheck source=tests/vm/lib.sh
. "$(dirname "$0")/lib.sh"

read -ra kernels <<<"${KERNEL:-5.10 6.1 6.12}"
read -ra numbers <<<"${CPUS:-2 8}"
read -ra tiers <<<"${TIER:-unit loopback netns programs}"
only=${ONLY:-}
is_root || die "the virtual machine needs root, to see the files of this one"

# The test programs, in the order in which cargo runs them.
list_tests() {
  (cd "$root" && "${CARGO:-cargo}" test --workspace --no-run --message-format json) |
    sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"executable":"\([^"]*\/deps\/[^"]*\)".*/\1\t\2/p' | sort -u
}

# Selects tests by their names: those of the loopback tier begin with loopback_, those of the netns
# tier with netns_. Sets "filter", arguments for the programs, and writes the list of these.
select_tests() { # TIER
  local place program trace=share_no_written_line programs=('-E' '/crates/manylane-(bench|cli|lab|preload)	')
  case $1 in
  unit) filter="--skip loopback_ --skip netns_" programs=(.) ;;
  loopback) filter="loopback_ --skip $trace" programs+=(-v) ;;
  netns) filter="netns_ --skip $trace" programs+=(-v) ;;
  virtio) filter="netns_xdp:: netns_by_xdp:: --skip $trace" programs=('/tests	.*/loopback-') ;;
  programs) filter="loopback_ netns_ --skip $trace" ;;
  trace) filter=$trace programs=(.) ;;
  *) die "TIER=$1: expected unit, loopback, netns, virtio, programs or trace" ;;
  esac
  if [ -n "$only" ]; then
    filter=$only programs=(.)
  fi
  # Those without such a test would be started for nothing.
  grep "${programs[@]}" "$tests" | while IFS=$'\t' read -r place program; do
    # shellcheck disable=SC2086 # arguments
    if "$program" $filter --list </dev/null 2>/dev/null | grep ': test$' >/dev/null; then
      printf '%s\t%s\n' "$place" "$program"
    fi
  done >"$tests.selected"
  [ -s "$tests.selected" ] || die "no test is called so: $filter"
}

# Two devices, joined by a bridge, that take the places of a veth pair: with the four queues of the
# tests. The driver would add one for each CPU, whose frames only the kernel gets, if there were as
# many more. Sets "devices".
join_devices() { # CPUS
  local device=() end slot=10
  [ "$1" -ge 4 ] || die "CPUS=$1: TIER=virtio needs 4 or more"
  make_network wire
  for end in client server; do
    add_device $end wire virtio-net-pci 52:54:00:00:00:$slot 4 ,addr=0x$slot
    devices+=("${device[@]}")
    slot=$((slot + 1))
  done
}

# Runs a tier, and adds a line to "$results".
run_tier() { # KERNEL CPUS TIER
  local name=$3-$2 line failed=0 ended='' log skips filter threads=$((2 + $2)) devices=() start=$SECONDS
  select_tests "$3"
  if [ "$3" = virtio ]; then
    join_devices "$2"
    threads=1
  fi
  log=$folder/out/$name.log skips=$folder/out/$name.skips
  mkdir -p "$folder/out"
  : >"$log"
  : >"$skips"
  boot "$name" "$2" 4G 5400 "$root/tests/vm/kernels-guest.sh" \
    TESTS="$tests.selected" LOG="$log" LIMIT=3600 FILTER="$filter --test-threads=$threads" \
    MANYLANE_SKIPS="$skips" CI=true RUST_BACKTRACE=1 \
    ${devices[0]:+MANYLANE_TEST_DEVICES="0000:00:10.0 0000:00:11.0"} -- "${devices[@]}"
  while IFS= read -r line <&"${from[$name]}"; do
    line=${line%$'\r'}
    case $line in
    "FAIL "*) failed=$((failed + 1)) ;;
    DONE) ended=1 ;;
    esac
    [ "$line" = DONE ] || echo "  $line"
  done
  clean
  [ -n "$ended" ] || { failed=$((failed + 1)) && echo "  FAIL the machine ended too early: $folder/$name.console"; }
  printf '%s\t%s CPUs\t%s\t%s\t%d s\t%d failures\n' "$1" "$2" "$3" \
    "$(total "$log" "$(grep -c . "$skips" || true)")" $((SECONDS - start)) "$failed" >>"$results"
  [ "$failed" -eq 0 ] || status=1
}

results=$root/target/vm/results.tsv
tests=$root/target/vm/tests.tsv
mkdir -p "$root/target/vm"
: >"$results"
status=0
list_tests >"$tests"
[ -s "$tests" ] || die "no test programs: cargo test --workspace --no-run"
for kernel in "${kernels[@]}"; do
  for cpus in "${numbers[@]}"; do
    for tier in "${tiers[@]}"; do
      echo "Linux $kernel, $cpus CPUs, $tier:"
      use_kernel "$kernel"
      run_tier "$kernel" "$cpus" "$tier"
    done
  done
done
cat "$results"
exit $status
