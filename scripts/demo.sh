#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Demonstration: compares one shared socket with lanes. MANYLANE is the program, which must be
# built, and REPORT the folder of the report.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

program=${MANYLANE:-target/release/manylane}
report=${REPORT:-report}

cd "$root"
if ! is_root; then
  say "not root: traffic runs over loopback, without a testbed of network namespaces;"
  say "for the testbed: sudo $program bench rx --quick --out $report"
fi
"${with_script[@]}" "$program" bench rx --quick --out "$report"

pages=()
for page in "$report"/*.html; do
  [ -e "$page" ] && pages+=("$(realpath "$page")")
done
[ ${#pages[@]} -gt 0 ] || die "the benchmark ended without a report in $report"
say "report with plots: ${pages[*]}"
