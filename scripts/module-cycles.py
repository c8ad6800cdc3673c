#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds cycles of modules: module-cycles.py [--edges | --self-test] [CRATE...]

Two graphs may have none. In both, names under another name and through a re-export count too, and
tests and what is for documentation are ignored.

- The modules of each folder: an edge from one to another if the code of the first, or of a module
  inside it, names the second or an item of it.
- The files of a crate, also a folder's own file and the files in that folder: an edge from one to
  another if the first names or re-exports an item that the second defines.

In both, a method is an item too: an edge from a file that names a type to one with a method in an
`impl` of that type, if the first calls a method of this name, of whatever value, and has no such
method of that type itself. A method of a trait counts if it is called of `self`.

The layers of the library, a table in ARCHITECTURE.md, are checked, too.
"""

import collections
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Comments are dropped, literals emptied: both may contain anything.
COMMENT_OR_LITERAL = re.compile(
    r"""(//[^\n]*|/\*.*?\*/)|\br(#*)".*?"\2|"(?:\\.|[^"\\])*"|'(?:\\[^'\n]+|[^'\\\n]|\\')'""", re.DOTALL
)
NOT_BUILT = re.compile(r"#\[cfg\((?:all\()?(?:test|doc)\b[^\n]*\n")
ITEM_START = re.compile(
    r"(?:\s|#\[[^\n]*\n|pub(?:\([^)]*\))?\s)*(use|mod|fn|impl|struct|enum|union|trait|type|const|static|unsafe|extern)?\b"
)
INLINE_MODULE = re.compile(r"\bmod \w+ \{")
IMPORT = re.compile(r"\buse\s+([^;]+);")
GROUP = re.compile(r"([\w:]*)\{([^{}]*)\}")
PATH = re.compile(r"(?<![\w:])(?:r#)?\w+(?:::(?:r#)?\w+)+")
# In a macro: an exported macro, which is at the root wherever it is defined; a path that is
# complete only where the macro is used.
MACRO_PATH = re.compile(r"\$crate::\w+!|\b\w+(?:::\w+)*::\$")
IMPL = re.compile(r"^\s*(?:unsafe )?impl\b", re.MULTILINE)
METHOD_CALL = re.compile(r"(\bself)?\s*\.\s*(\w+)(?:::<[^()]*>)?\(")
ITEM = re.compile(r"\b(?:fn|struct|enum|union|trait|type|const|static|macro_rules!)\s+(\w+)")


def item_end(text, at):
    """Where the item, variant, field or match arm ends that begins at `at`."""
    keyword = ITEM_START.match(text, at)[1]
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth < 0:
            return place
        ends = text[place] == ";" or text[place] == "}" and keyword != "use" or text[place] == "," and not keyword
        if depth == 0 and ends:
            return place + 1
    return len(text)


def code_of(text):
    """The text without comments, literals, tests and imports for documentation. Inline modules
    count as the file's own code."""
    text = COMMENT_OR_LITERAL.sub(lambda match: "" if match[1] else '""', text)
    while match := NOT_BUILT.search(text):
        text = text[: match.start()] + text[item_end(text, match.end()) :]
    for match in INLINE_MODULE.finditer(text):
        end = item_end(text, match.start())
        body = re.sub(r"\bsuper(::(?:super::)*)", lambda found: found[1][2:] or "self::", text[match.end() : end])
        # As long as before: the places of the modules that follow stay the same.
        text = text[: match.end()] + body.ljust(end - match.end()) + text[end:]
    return text


def impls_of(code):
    """The types (paths) with an `impl`, each with the items in it; of a trait: `self.item`."""
    found = collections.defaultdict(set)
    for match in IMPL.finditer(code):
        head, _, body = code[match.end() : item_end(code, match.start())].partition("{")
        # Innermost generics first. An arrow ends none.
        head = head.replace("->", "")
        while head != (head := re.sub(r"<[^<>]*>", "", head)):
            pass
        trait, _, self_type = re.split(r"\bwhere\b", head)[0].rpartition(" for ")
        items = re.findall(r"\b(?:fn|const|type) (\w+)", body)
        found[tuple(self_type.strip().split("::"))].update(f"self.{item}" if trait else item for item in items)
    return found


class Module:
    def __init__(self, text):
        code = code_of(text)
        self.imports = collections.defaultdict(set)  # Name to the paths that it stands for.
        self.globs = set()
        for tree in IMPORT.findall(code):
            # Innermost groups first: a::{b::{c, d}, e} is a::{b::c, b::d, e}, then a::b::c and so
            # on.
            while match := GROUP.search(tree):
                parts = [match[1] + part.strip() for part in match[2].split(",") if part.strip()]
                tree = tree[: match.start()] + ", ".join(parts) + tree[match.end() :]
            for leaf in tree.split(","):
                self.add_import(leaf)
        code = MACRO_PATH.sub("", IMPORT.sub("", code))
        self.items = set(ITEM.findall(code))
        self.words = set(re.findall(r"\w+", code))
        self.impls = impls_of(code)
        self.calls = set().union(*({item, f"{value}.{item}"} for value, item in METHOD_CALL.findall(code)))
        self.paths = {tuple(path.replace("r#", "").split("::")) for path in PATH.findall(code)}
        self.paths |= {path for paths in self.imports.values() for path in paths}
        self.names = self.words | {path[-1] for path in self.paths}

    def add_import(self, leaf):
        path, _, alias = leaf.replace("r#", "").partition(" as ")
        words = tuple("".join(path.split()).split("::"))
        if words[-1] == "self" and len(words) > 1:
            words = words[:-1]
        if words[-1] == "*":
            self.globs.add(words[:-1])
        elif words[0]:
            self.imports[alias.strip() or words[-1]].add(words)


class Crate:
    def __init__(self, source):
        paths = [path for path in source.rglob("*.rs") if "tests" not in path.relative_to(source).parts]
        paths = [path for path in paths if path.stem != "tests" and not path.stem.endswith("_tests")]
        self.modules = {self.module_of(source, path): Module(path.read_text()) for path in paths}
        # A glob that imports from a module with a glob needs another pass.
        while any([self.expand_globs(at) for at in self.modules]):
            pass

    @staticmethod
    def module_of(source, path):
        parts = path.relative_to(source).with_suffix("").parts
        return parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts

    def expand_globs(self, at):
        """Turns a glob into imports of all names in its module. True if it found new ones."""
        module, count = self.modules[at], len(self.modules[at].imports)
        for glob in module.globs:
            end = self.resolve(at, glob)[1]
            if end in self.modules and end != at:
                source = self.modules[end]
                children = {other[-1] for other in self.modules if other and other[:-1] == end}
                for name in source.items | set(source.imports) | children:
                    if name not in module.items and name not in module.imports:
                        module.imports[name].add((*glob, name))
                        if name in module.words:
                            module.paths.add((*glob, name))
        return len(module.imports) > count

    def resolve(self, at, path, seen=frozenset()):
        """The modules that the path leads through, the one that it names (None: an item), and those
        that define the item."""
        found, words = set(), path
        if (at, path) in seen:
            return found, None, set()
        if words[0] in ("crate", "self", "super"):
            at = {"crate": (), "self": at, "super": at[:-1]}[words[0]]
            words = words[1:]
        for number, word in enumerate(words):
            found.add(at)
            if word == "super":
                at = at[:-1]
            elif at + (word,) in self.modules:
                at += (word,)
            else:
                module = self.modules[at]
                end, definers = None, set() if word in module.imports and word not in module.items else {at}
                for target in module.imports.get(word, ()):
                    # Of the same name: another crate.
                    if target[0] != word:
                        more, end, others = self.resolve(at, target + words[number + 1 :], seen | {(at, path)})
                        found |= more
                        definers |= others
                return found, end, definers
        return found | {at}, at, set()

    def uses(self):
        """Module to those that it names, and to those whose items it names."""
        named, items = {}, {}
        # Type, by its name and the file that defines it, to the files with an `impl` of it.
        impls = collections.defaultdict(dict)
        for at, module in self.modules.items():
            for path, methods in module.impls.items():
                for definer in self.resolve(at, path)[2]:
                    impls[definer, path[-1]].setdefault(at, set()).update(methods)
        for at, module in self.modules.items():
            resolved = [self.resolve(at, path) for path in module.paths]
            named[at] = set().union(*(found for found, _, _ in resolved)) - {at}
            items[at] = set().union(*(definers for _, _, definers in resolved)) - {at}
            for (definer, type_name), files in impls.items():
                if at == definer or at in files or definer in items[at] and type_name in module.names:
                    owners = (("Self",), (type_name,))
                    named_items = {path[-1] for path in module.paths if path[-2:-1] in owners}
                    calls = module.calls.union(named_items, (f"self.{item}" for item in named_items))
                    own = files.get(at, set())
                    users = {file for file, methods in files.items() if file != at and calls & methods - own}
                    named[at] |= users
                    items[at] |= users
        return named, items


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


def cycles_of(source):
    """For each cycle, what it is in (a folder, or None: the files), its nodes, and the edges: node
    to node to the names of the modules that use each other."""
    named, items = Crate(source).uses()
    if not named:
        sys.exit(f"{source} has no modules")
    graphs = collections.defaultdict(lambda: collections.defaultdict(dict))
    for module, others in named.items():
        for other in others:
            depth = next((n for n, (a, b) in enumerate(zip(module, other)) if a != b), None)
            if depth is not None:
                edges = graphs[name(module[:depth])][module[depth]]
                edges.setdefault(other[depth], set()).add((name(module), name(other)))
    for module, others in items.items():
        graphs[None][name(module)] = {name(other): {(name(module), name(other))} for other in others}
    for folder, edges in graphs.items():
        graph = collections.defaultdict(set)
        for module, others in edges.items():
            graph[module] |= set(others)
            for other in others:
                graph.setdefault(other, set())
        for cycle in cycles(graph):
            yield folder, cycle, edges


def name(module):
    return "::".join(("crate", *module))


def check(crate, show_edges):
    failed = False
    for folder, cycle, edges in cycles_of(ROOT / crate / "src"):
        failed = True
        print(f"{crate}: {folder or 'files'}: a cycle of {len(cycle)}: {' '.join(cycle)}")
        for module in cycle if show_edges else ():
            for other in sorted(set(edges[module]) & set(cycle)):
                names = "; ".join(f"{a} uses {b}" for a, b in sorted(edges[module][other]))
                print(f"    {module} -> {other}: {names}")
    return failed


def check_layers():
    """Checks the table of layers in ARCHITECTURE.md: each uses only itself and those above it."""
    layers = {}
    table = (ROOT / "ARCHITECTURE.md").read_text()
    for layer, row in enumerate(re.findall(r"^\| \d[^|]*\|(.*)\|$", table, re.MULTILINE)):
        for module in re.findall(r"`(\w+)`", row):
            layers.setdefault(module, layer)
    crate = Crate(ROOT / "crates" / "manylane" / "src")
    named, _ = crate.uses()
    # Not modules that are declared for tests only.
    built = {module: others for module, others in named.items() if crate.modules[()].words & set(module[:1])}
    edges = {(module[0], other[0]) for module, others in built.items() for other in others if other}
    wrong = [edge for edge in sorted(edges) if not set(edge) <= set(layers) or layers[edge[0]] < layers[edge[1]]]
    for module, other in wrong:
        print(f"manylane: {module} uses {other}, which the layers in ARCHITECTURE.md do not allow")
    return bool(wrong)


# In each crate, b uses a. The other way is hidden, or there is none.
B = """use crate::a::Item;
pub struct Thing(Item);
impl Item {
    pub fn thing<T>(&self) {}
}
impl<'a> Iterator for Item
where
    Item: Sized,
{
    type Item = u8;
    fn next(&mut self) -> Option<u8> {}
}
"""
BOTH = [["a", "b"], ["crate::a", "crate::b"]]
SELF_TEST = {
    "a plain cycle": (BOTH, "mod a;\nmod b;\n", "use crate::b::Thing;\npub struct Item;\n"),
    "no cycle": ([], "mod a;\nmod b;\npub use b::Thing;\n", "pub struct Item;\n"),
    "a re-export": (BOTH, "mod a;\nmod b;\npub use b::Thing;\n", "use super::Thing;\npub struct Item;\n"),
    "a group, renamed": (
        BOTH,
        "mod a;\nmod b;\npub(crate) use self::{\n    a::Item,\n    b::{Thing as Renamed},\n};\n",
        "use crate::{Renamed as Again};\npub struct Item;\n",
    ),
    "a private import, not imported": (
        BOTH,
        "mod a;\nmod b;\nuse b::Thing;\n",
        "pub struct Item;\nfn one(_: super::Thing) {}\n",
    ),
    "a module, renamed": (BOTH, "mod a;\nmod b;\n", "use crate::b as c;\npub struct Item;\nfn one(_: c::Thing) {}\n"),
    "a glob": (BOTH, "mod a;\nmod b;\npub(crate) use b::*;\n", "use super::*;\npub struct Item(Thing);\n"),
    "a glob, name not used": ([], "mod a;\nmod b;\npub(crate) use b::*;\n", "use super::*;\npub struct Item;\n"),
    "an item of the parent's file": (
        [["crate", "crate::a", "crate::b"]],
        "mod a;\nmod b;\npub use b::Thing;\npub struct Value;\n",
        "use super::Value;\npub struct Item(Value);\n",
    ),
    "an item of the parent's file, which uses no child": (
        [],
        "mod a;\nmod b;\npub struct Value;\n",
        "use super::Value;\npub struct Item(Value);\n",
    ),
    "an inline module": (
        [],
        "mod a;\nmod b;\npub use b::Thing;\n",
        "pub struct Thing;\npub struct Item;\nmod inner {\n    pub(super) use super::Thing;\n}\n",
    ),
    "a method": (BOTH, "mod a;\nmod b;\n", "pub struct Item;\nfn one(item: Item) {\n    item.thing();\n}\n"),
    "a method with a type": (
        BOTH,
        "mod a;\nmod b;\n",
        "pub struct Item;\nfn one(item: Item) {\n    item\n        .thing::<u8>();\n}\n",
    ),
    "a method of a type of a third file": (
        [["a", "b"]],
        "mod a;\nmod b;\npub struct Item;\n",
        "pub use crate::Item;\nfn one(item: Item) {\n    item.thing();\n}\n",
    ),
    "a method as a function": (BOTH, "mod a;\nmod b;\n", "pub struct Item;\nconst ONE: fn(&Item) = Item::thing;\n"),
    "a method of Self": (
        BOTH,
        "mod a;\nmod b;\n",
        "pub struct Item;\nimpl Item {\n    fn one(&self) {\n        Self::thing(self);\n    }\n}\n",
    ),
    "a method of its own": (
        [],
        "mod a;\nmod b;\n",
        "pub struct Item;\nimpl<T> Other<T> {\n    fn thing(&self) {}\n}\nimpl Item {\n    fn thing(&self) {}\n"
        "    fn one(&self) {\n        self.thing();\n    }\n}\n",
    ),
    "a method of a trait": (
        BOTH,
        "mod a;\nmod b;\n",
        "pub struct Item;\nimpl Item {\n    fn one(&mut self) {\n        self.next();\n    }\n}\n",
    ),
    "a method of a trait, of another value": (
        [],
        "mod a;\nmod b;\n",
        "pub struct Item;\nfn one(mut item: Other) {\n    item.next();\n}\n",
    ),
    "an exported macro": (
        [],
        "mod a;\nmod b;\npub use a::Item;\n",
        "pub struct Item;\nmacro_rules! one {\n    () => { $crate::one!(1) };\n    (1) => { super::one::$name };\n}\n",
    ),
    "tests, comments, documentation and literals": (
        [],
        "mod a;\nmod b;\npub use b::Thing;\n",
        "pub struct Item;\n// crate::Thing\nconst TEXT: &str = \"crate::Thing\";\n"
        "enum Kind {\n    #[cfg(test)]\n    Sim(crate::Thing),\n}\n"
        "#[cfg(doc)]\nuse crate::Thing;\n"
        "#[cfg(test)]\nuse crate::{\n    Thing,\n};\n#[cfg(test)]\nmod tests {\n    use crate::Thing;\n}\n",
    ),
}


def self_test():
    failed = False
    for case, (expected, lib, a) in SELF_TEST.items():
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder)
            for file, text in (("lib.rs", lib), ("a.rs", a), ("b.rs", B)):
                (source / file).write_text(text)
            found = [cycle for _, cycle, _ in cycles_of(source)]
            if found != expected:
                failed = True
                print(f"module-cycles.py --self-test: {case}: found {found or 'no cycle'}")
    return failed


def main():
    words = sys.argv[1:]
    if "--self-test" in words:
        return self_test()
    crates = [word for word in words if not word.startswith("-")]
    sources = sorted(path.parent.relative_to(ROOT) for path in (*ROOT.glob("*/src"), *ROOT.glob("crates/*/src")))
    crates = [crate for crate in sources if not crates or crate.name in crates]
    if not crates:
        sys.exit(f"there is no such crate: {' '.join(words)}")
    failed = [check(crate, "--edges" in words) for crate in crates]
    return any([*failed, check_layers()])


if __name__ == "__main__":
    sys.exit(main())
