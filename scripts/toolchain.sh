#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Prints the toolchain to put into RUSTUP_TOOLCHAIN, or nothing when
# rust-toolchain.toml already does.
#
# rustup takes the version that rust-toolchain.toml names for missing when it is
# installed under the name of "stable" only, and then wants to download it.
# Without a network that fails, for a compiler that is there.
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
