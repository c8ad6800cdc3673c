#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Compares random calls on UDP sockets under 'manylane run' with a model: stress.sh SECONDS [SEED]
#
# MANYLANE is the program. With MANYLANE_TEST_PREFETCH=1 it also prefetches while all lanes are
# active, if it was built with debug assertions. A run that fails prints its seed. Another run with
# this seed makes the same choices, but its threads may run in another order.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

seconds=${1:?stress.sh SECONDS [SEED]}
shift
program=${MANYLANE:-$root/target/debug/manylane}
target=${CARGO_TARGET_DIR:-$root/target}
mkdir -p "$target"
cc -O1 -g -Wall -Wextra -Werror -pthread -o "$target/stress" "$root"/crates/manylane-cli/tests/stress/*.c
"${with_script[@]}" "$program" run -- "$target/stress" "$seconds" "$@"
