#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Circles of modules: module-cycles.py [--edges] [CRATE...]

The modules of one folder are looked at together: an arrow goes from one to another if its code, or
that of a module inside it, names the other. A module may use the folder's own file and be used by
it: only arrows between siblings count. Tests do not.
"""

import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATHS = re.compile(r"\b((?:crate|self|super)(?:::(?:super|r#)?\w+)+)")


def code_of(path):
    """The text without comments, strings and tests; grouped imports are written out."""
    text = path.read_text()
    text = re.split(r"\n#\[cfg\((?:all\()?test\b[^\n]*\n(?:#\[[^\n]*\n)*(?:pub(?:\([^)]*\))? )?mod \w+ \{", text)[0]
    text = re.sub(r"#\[cfg\((?:all\()?test\b[^\n]*\n(?:#\[[^\n]*\n)*[^\n]*;", "", text)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    while match := re.search(r"((?:\w+::)+)\{([^{}]*)\}", text):
        parts = [part.strip() for part in match[2].split(",") if part.strip()]
        text = text[: match.start()] + " ".join(match[1] + part for part in parts) + text[match.end() :]
    return text


def module_of(source, path):
    parts = list(path.relative_to(source).with_suffix("").parts)
    return tuple(parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts)


def read(source):
    """Module to those that it names."""
    files = [path for path in source.rglob("*.rs") if "tests" not in path.relative_to(source).parts]
    files = [path for path in files if path.stem != "tests" and not path.stem.endswith("_tests")]
    modules = {module_of(source, path): path for path in files}
    uses = {}
    for module, path in modules.items():
        found = set()
        for text in PATHS.findall(code_of(path)):
            words = text.split("::")
            at = () if words[0] == "crate" else module
            if words[0] == "super":
                at = module[:-1]
            for word in words[1:]:
                if word == "super":
                    at = at[:-1]
                elif at + (word,) in modules:
                    at += (word,)
                else:
                    break
            found.add(at)
        uses[module] = found - {module}
    return uses


def cycles(graph):
    """Strongly connected sets of more than one."""
    index, low, stack, done = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                done.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return done


def check(crate, show_edges):
    source = ROOT / "crates" / crate / "src"
    uses = read(source)
    if not uses:
        sys.exit(f"{source} has no modules")
    folders = collections.defaultdict(lambda: collections.defaultdict(dict))
    for module, others in uses.items():
        for other in others:
            depth = next((n for n, (a, b) in enumerate(zip(module, other)) if a != b), None)
            if depth is not None:
                folders[module[:depth]][module[depth]].setdefault(other[depth], []).append((module, other))
    failed = False
    for folder, edges in sorted(folders.items()):
        graph = collections.defaultdict(set)
        for module, others in edges.items():
            graph[module] |= set(others)
            for other in others:
                graph.setdefault(other, set())
        for circle in cycles(graph):
            failed = True
            print(f"{crate}: {'::'.join(('crate', *folder))}: a circle of {len(circle)}: {' '.join(circle)}")
            if show_edges:
                for module in circle:
                    for other in sorted(set(edges.get(module, {})) & set(circle)):
                        names = sorted({"::".join(a) + " uses " + "::".join(b) for a, b in edges[module][other]})
                        print(f"    {module} -> {other}: {'; '.join(names)}")
    return failed


def main():
    words = sys.argv[1:]
    crates = [word for word in words if not word.startswith("-")]
    crates = crates or sorted(path.parent.name for path in ROOT.glob("crates/*/src"))
    failed = [check(crate, "--edges" in words) for crate in crates]
    return any(failed)


if __name__ == "__main__":
    sys.exit(main())
