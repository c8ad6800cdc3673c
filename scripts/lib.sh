# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
# Sourced by the other scripts: paths of the repository and of cargo, and messages.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export root

# A login shell has cargo in PATH; make from a desktop, cron or CI often has not.
if ! command -v cargo >/dev/null && [ -x "${HOME:-}/.cargo/bin/cargo" ]; then
  PATH=$PATH:$HOME/.cargo/bin
fi

# What runs under make has it already.
toolchain=$("$root/scripts/toolchain.sh")
if [ -n "$toolchain" ]; then
  export RUSTUP_TOOLCHAIN=$toolchain
fi

say() { printf '%s\n' "manylane: $*" >&2; }
die() {
  say "$*"
  exit 1
}
is_root() { [ "$(id -u)" -eq 0 ]; }

# Before a program: it ends with this script, in whatever way the script ends. Bash leaves the
# program in the foreground behind.
with_script=(setpriv --pdeathsig TERM)
"${with_script[@]}" true 2>/dev/null || with_script=()

# One line for all test programs of a log, in the words of each one's own summary. The
# skips ran as tests that returned at once, so they are among the passed ones.
total() { # LOG SKIPS
  awk -v skips="$2" '
    /^test result:/ {
      for (i = 2; i < NF; i++) {
        if ($(i + 1) ~ /^passed/) passed += $i
        if ($(i + 1) ~ /^failed/) failed += $i
      }
    }
    END { printf "%d passed, %d failed, %d skipped\n", passed - skips, failed, skips }
  ' "$1"
}
