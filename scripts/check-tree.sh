#!/usr/bin/env bash
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# Checks the tree beyond the compilers: lengths of files, documents and comments, cycles of modules,
# SPDX lines, unused headers, the sources of the eBPF objects, the server of the README.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

cd "$root"
failed=0
complain() {
  say "$*"
  failed=1
}

max=800
while IFS= read -r file; do
  [ -f "$file" ] || continue
  lines=$(wc -l <"$file")
  [ "$lines" -le $max ] || complain "$file has $lines lines, but the maximum is $max: split it by stage"
done < <(git ls-files '*.rs' '*.c' '*.h' '*.sh' .ci/run Makefile)

while IFS= read -r file; do
  head -n 3 "$file" | grep -q 'SPDX-License-Identifier:' ||
    complain "$file has no SPDX-License-Identifier in its first lines"
done < <(git ls-files '*.c' '*.h' '*.sh' .ci/run Makefile)

# Comments end before column 100; tables and drawings cannot be wrapped.
while IFS= read -r found; do
  complain "$(cut -d: -f1,2 <<<"$found"): a comment exceeds 100 columns"
done < <(LC_ALL=C.UTF-8 git grep -nE '^.{101,}$' -- '*.rs' |
  LC_ALL=C.UTF-8 grep -E '^[^:]*:[0-9]+: *//' | LC_ALL=C.UTF-8 grep -vE ':[0-9]+: *//[/!]? *[|]|[─│►▲▼]')
while IFS= read -r file; do
  while IFS= read -r line; do
    complain "$file:$line: a comment exceeds 100 columns"
  done < <(expand "$file" | LC_ALL=C.UTF-8 grep -nE '^.{101,}$' | LC_ALL=C.UTF-8 grep -E '^[0-9]+: *[*]|/[*]' |
    LC_ALL=C.UTF-8 grep -v '[─│►▲▼]' | cut -d: -f1)
done < <(git ls-files '*.c' '*.h')

while IFS= read -r found; do
  complain "$(cut -d: -f1,2 <<<"$found"): a comment exceeds 100 columns"
done < <(LC_ALL=C.UTF-8 git grep -nE '^.{101,}$' -- '*.toml' '*.py' '*.sh' .ci/run Makefile |
  LC_ALL=C.UTF-8 grep -E '^[^:]*:[0-9]+: *(#|""")')

[ "$(wc -l <ARCHITECTURE.md)" -le 200 ] || complain "ARCHITECTURE.md has more than 200 lines"

python3 scripts/module-cycles.py --self-test || failed=1
python3 scripts/module-cycles.py || failed=1

# The assertions on layouts in the headers; Rust has its own.
for header in abi/*.h; do
  cc -fsyntax-only -x c "$header" || complain "$header: a layout assertion fails"
done

# The objects match the sources; .ci/run compiles them again.
(cd bpf && sha256sum --quiet --check objects/SOURCES) || complain "bpf/objects was compiled from other sources: run 'make bpf'"

# The README shows the example verbatim.
example=crates/manylane/examples/echo.rs
shown=$(awk '/^```rust$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' README.md)
[ "$shown" = "$(cat "$example")" ] || complain "README.md and $example differ: copy the example into the README"
[ "$(wc -l <"$example")" -le 20 ] || complain "$example is longer than the twenty lines that the README promises"

exit "$failed"
