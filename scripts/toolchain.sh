#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Prints the value for RUSTUP_TOOLCHAIN, or nothing if rust-toolchain.toml suffices.
#
# If the version of rust-toolchain.toml is installed only as "stable", rustup considers it missing
# and tries to download it, which fails without a network.
set -euo pipefail

[ -z "${RUSTUP_TOOLCHAIN:-}" ] && command -v rustup >/dev/null || exit 0
cd "$(dirname "$0")/.."
pinned=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
installed=$(rustup toolchain list 2>/dev/null || true)
if grep -q "^$pinned" <<<"$installed" || ! grep -q '^stable' <<<"$installed"; then
  exit 0
fi
case $(RUSTUP_TOOLCHAIN=stable rustc --version 2>/dev/null || true) in
"rustc $pinned "*) echo stable ;;
esac
