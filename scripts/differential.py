#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares random calls with and without 'manylane run': differential.py [SECONDS] [SEED]

A seed determines scripts of calls. crates/manylane-cli/tests/differential makes the calls of a
script one by one, and prints their results. A script whose outputs differ is reduced to the fewest
calls whose outputs still differ. MANYLANE is the program to test.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shlex
import sys
import tempfile
import threading
import time

# No __pycache__ beside the sources.
sys.dont_write_bytecode = True

import leftovers

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "crates/manylane-cli/tests/differential"
# Scripts that differed once: they are compared first.
REGRESSIONS = sorted((SOURCES / "regressions").glob("*.txt"))
MANYLANE = os.environ.get("MANYLANE") or str(ROOT / "target/debug/manylane")
# Options of 'manylane run', with variables before them; scripts take turns. With
# MANYLANE_TEST_PREFETCH=1, a library that was built with debug assertions prefetches also while all
# lanes are active (shared/failpoint.rs).
OPTIONS = ["", "--lanes 2", "MANYLANE_TEST_PREFETCH=1", "", "--lanes 8 --rx-usecs 0", "--rx-usecs 20000"]
WAITS = ["poll", "ppoll", "select", "pselect", "epoll_wait"]
# Scripts that one process runs.
CHUNK = 40
PROCESSES = 2 * (os.cpu_count() or 1)
# Runs of a script until its outputs differ again, or until no step of it is late.
TRIES = 20
# Maximum run time of such a process, in seconds.
PROCESS_TIMEOUT_S = 300

# Not in it, for they are known to differ: EPOLLONESHOT while lanes are being emptied; connect(2)
# with AF_UNSPEC, which gives a port back that lanes keep; tables of descriptors that threads do not
# share (CLOSE_RANGE_UNSHARE); a socket that is passed on (SCM_RIGHTS) while its lanes hold
# something.
#
# What {NAME} in a call may be: one of these, each as likely. Sockets that are received on are s0 to
# s2, bound to a0 to a2; s4 and s5 mostly send; s8 and s9 are epoll instances.
CHOICES = {
    "rx": ["s0", "s0", "s0", "s1", "s2"],
    "tx": ["s4", "s4", "s5"],
    "udp": ["{rx}", "{rx}", "{tx}"],
    "epoll": ["s8", "s8", "s9"],
    "other": ["s12", "s13", "s14", "s15"],
    "number": ["-1", "3", "5", "9", "64", "700", "1000", "1023", "1024"],
    "fd": ["{rx}"] * 10 + ["{tx}"] * 4 + ["{other}"] * 4 + ["{epoll}", "{number}"],
    "from": ["{rx}"] * 8 + ["{tx}", "{fd}"],
    "new": ["{rx}", "{other}"],
    "to": ["a0"] * 8 + ["a1", "a1", "a2", "a4", "a7"],
    "peer": ["a4", "a4", "a5", "a0"],
    "len": ["0", "1", "2", "10", "60", "{hundreds}", "{hundreds}"],
    "hundreds": [str(number) for number in range(100, 2000, 37)],
    "few": list("012345"),
    "bit": ["0", "1"],
    "family": ["AF_INET"] * 4 + ["AF_INET6"],
    "now": ["MSG_DONTWAIT"] * 3 + ["MSG_NOSIGNAL"],
    "more": [""] * 4 + ["|MSG_PEEK", "|MSG_TRUNC", "|MSG_PEEK|MSG_TRUNC", "|MSG_WAITALL", "|MSG_NOSIGNAL"],
    "ms": ["0"] * 6 + ["1", "3"],
    "events": ["POLLIN"] * 4 + ["POLLIN|POLLOUT", "POLLOUT", "POLLPRI", "POLLIN|POLLPRI", "POLLRDNORM"],
    "entries": ["{fd} {events}"] * 3 + ["{fd} {events} {fd} {events}", "{fd} {events} {fd} {events} {fd} {events}"],
    "watched": ["EPOLLIN"] * 6 + ["EPOLLIN|EPOLLOUT", "EPOLLOUT", "0", "EPOLLIN|EPOLLET"],
    "change": ["EPOLL_CTL_ADD"] * 4 + ["EPOLL_CTL_MOD", "EPOLL_CTL_DEL"],
    "option": [
        "SOL_SOCKET SO_REUSEADDR",
        "SOL_SOCKET SO_REUSEPORT",
        "SOL_SOCKET SO_BROADCAST",
        "SOL_SOCKET SO_PRIORITY",
        "SOL_SOCKET SO_RXQ_OVFL",
        "SOL_SOCKET SO_TIMESTAMP",
        "SOL_SOCKET SO_RCVLOWAT",
        "SOL_IP IP_TOS",
        "SOL_IP IP_TTL",
        "SOL_IP IP_PKTINFO",
        "SOL_IP IP_RECVTTL",
        "SOL_IP IP_RECVTOS",
        "SOL_IP IP_RECVERR",
        "SOL_IPV6 IPV6_V6ONLY",
        "SOL_IPV6 IPV6_RECVPKTINFO",
    ],
    "asked": ["{option}"] * 3 + ["SOL_SOCKET SO_ERROR", "SOL_SOCKET SO_RCVBUF", "SOL_SOCKET SO_TYPE"],
    "least": ["0", "3", "20", "900", "1023", "1024", "-1"],
    "how": ["SHUT_RD", "SHUT_WR", "SHUT_RDWR", "7"],
}

# Calls by what they are about, and how often that comes up in a script that has it. The first two
# are in each.
CALLS = {
    "receive": (
        30,
        [
            "recv {from} {len} {now}{more}",
            "recvfrom {from} {len} {now}{more} 16",
            "recvfrom {from} {len} {now}{more} 4",
            "recvmsg {from} {len} {now}{more} 255",
            "recvmsg {from} {len} {now}{more} 8",
            "recvmmsg {from} {few} {len} {now}{more}",
            "recvmmsg {from} {few} {len} MSG_WAITFORONE",
            "read {from} {len}",
            "readv {from} {len}",
        ],
    ),
    "send": (30, ["sendto {tx} {to} {len} 0", "sendmsg {tx} {to} {len} 0", "sendmmsg {tx} {to} {few} {len} 0"]),
    "drain": (4, ["drain {from}"]),
    "wait": (12, ["poll {ms} {entries}", "ppoll {ms} {entries}", "select {ms} {entries}", "pselect {ms} {entries}"]),
    "size": (4, ["fionread {fd}"]),
    "epoll": (
        16,
        [
            "epoll_create {epoll}",
            "epoll_ctl {epoll} {change} {fd} {watched}",
            "epoll_ctl {epoll} {change} {rx} {watched}",
            "epoll_ctl {epoll} {change} {rx} EPOLLIN",
            "epoll_wait {epoll} 16 {ms} {bit}",
            "epoll_wait {epoll} 16 {ms} 2",
            "epoll_wait {epoll} 16 0 0",
        ],
    ),
    "reply": (6, ["sendto {rx} {peer} {len} 0", "sendmsg {rx} {peer} {len} 0", "recvfrom {tx} 2048 MSG_DONTWAIT 16"]),
    "names": (3, ["getsockname {fd}", "getpeername {fd}", "open", "probe {to} SO_REUSEADDR {bit}"]),
    "options": (6, ["setsockopt {fd} {option} {bit} 4", "setsockopt {fd} {option} 8 {few}", "getsockopt {fd} {asked} {few}"]),
    "timeout": (4, ["timeout {rx} 10000", "timeout {rx} 0", "gettimeout {fd}"]),
    "nonblock": (3, ["fionbio {fd} {bit}", "fcntl {fd} F_SETFL O_NONBLOCK", "fcntl {fd} F_SETFL 0", "fcntl {fd} F_GETFL 0"]),
    "dup": (
        6,
        [
            "dup {fd} {new}",
            "dup2 {fd} {fd} {new}",
            "dup3 {fd} {fd} {new} {bit}",
            "dup3 {fd} {fd} {new} O_CLOEXEC",
            "fcntl {fd} F_DUPFD {least} {new}",
            "fcntl {fd} F_DUPFD_CLOEXEC {least} {new}",
            "fcntl {fd} F_GETFD 0",
        ],
    ),
    "close": (4, ["close {fd}", "rawclose {fd}"]),
    "range": (1, ["close_range {fd} 1023 0", "close_range {fd} 0xffffffff 4"]),
    "again": (5, ["socket {rx} {family} SOCK_DGRAM 0", "socket {rx} {family} SOCK_DGRAM|SOCK_NONBLOCK 0", "bind {rx} {to} {family} {bit}"]),
    "others": (
        10,
        [
            "pipe {other} {other}",
            "pair {other} {other} SOCK_DGRAM",
            "tcp {other} {other}",
            "eventfd {other} 3",
            "timerfd {other}",
            "memfd {other}",
            "file {other}",
            "read {other} {len}",
            "readv {other} {len}",
            "write {other} 8",
            "writev {other} 8",
            "recv {other} 64 MSG_DONTWAIT",
            "send {other} 8 MSG_DONTWAIT",
            "close {other}",
        ],
    ),
    "blocked": (
        4,
        [
            "timeout {rx} 300000\nrecv {rx} 100 0\nsendto {tx} {to} 50 0",
            "timeout s0 300000\nrecvfrom s0 100 {more} 16\nsendto {tx} a0 {len} 0",
            "timeout s0 300000\nrecvmmsg s0 1 100 MSG_WAITFORONE\nsendmsg {tx} a0 {len} 0",
            "timeout s0 300000\nread s0 100\nsendto {tx} a0 {len} 0",
            "drain s0\npoll 300 s0 POLLIN\nsendto {tx} a0 {len} 0",
            "drain s0\nselect 300 s0 POLLIN\nsendto {tx} a0 {len} 0",
            "epoll_ctl {epoll} EPOLL_CTL_ADD s0 {watched}\nepoll_wait {epoll} 16 300 {bit}\nsendto {tx} a0 {len} 0",
        ],
    ),
    "passed": (1, ["pair s14 s15 SOCK_DGRAM", "pass {other} s14 s15 {new}", "pass {other} {other} {other} {new}"]),
    "connect": (2, ["connect {udp} {to}", "send {udp} 9 0", "write {udp} 9", "writev {udp} 9"]),
    "errors": (1, ["shutdown {fd} {how}", "recvmsg {rx} 64 MSG_ERRQUEUE|MSG_DONTWAIT 255", "setsockopt {rx} SOL_IP IP_RECVERR 1 4"]),
    "fork": (3, ["fork {bit}", "leave"]),
    "end": (1, ["leave"]),
}


def script(name):
    """The lines of a script, or of a file. What it is about is chosen first: one of everything
    would never have lanes for long."""
    if os.path.exists(name):
        lines = pathlib.Path(name).read_text().splitlines()
        return [line for line in lines if not line.startswith("#")]
    rng = random.Random(name)

    def call(text, actor=None):
        while "{" in text:
            text = re.sub(r"\{(\w+)\}", lambda name: rng.choice(CHOICES[name[1]]), text)
        steps = text.split("\n")
        for nth, step in enumerate(steps):
            # One that goes on is cheaper than another one that begins.
            if actor is not None or len(steps) > 1 or rng.random() < 0.5:
                who[0] = rng.choice(actors) if actor is None else actor
            # Of three, the second one waits for what the third one sends.
            lines.append(f"{who[0]}{'+' if (len(steps), nth) == (3, 1) else ''} {step}")
        if text.startswith("fork"):
            actors.append(4 + int(text[-1]))

    lines, who = [], [0]
    threads = rng.choice([1, 2, 3, 4, 4])
    actors = list(range(threads))
    about = list(CALLS)[:2] + [group for group in list(CALLS)[2:] if rng.random() < 0.4]
    for nth in range(rng.choice([1, 1, 2, 3])):
        family = rng.choice(CHOICES["family"])
        call(f"socket s{nth} {family} {rng.choice(['SOCK_DGRAM', 'SOCK_DGRAM|SOCK_NONBLOCK'])} 0", 0)
        call(f"bind s{nth} a{nth} {family} {{bit}}", 0)
    for slot in "45":
        call(f"socket s{slot} AF_INET SOCK_DGRAM 0", 0)
        if rng.random() < 0.7:
            call(f"bind s{slot} a{slot} AF_INET 0", 0)
    # Who comes back often enough gets a lane.
    for actor in list(range(threads)) * rng.choice([0, 3, 3]):
        call("sendto s4 a0 {len} 0", 0)
        call("recvfrom s0 2048 MSG_DONTWAIT 16", actor)
    weights = [CALLS[group][0] for group in about]
    for group in rng.choices(about, weights, k=rng.randrange(10, 90)):
        call(rng.choice(CALLS[group][1]))
    return lines


class Runner:
    def __init__(self, folder):
        self.program = os.path.join(folder, "differential")
        self.folder = folder
        self.pool = concurrent.futures.ThreadPoolExecutor(2 * PROCESSES)
        self.lanes = 0
        flags = ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", self.program]
        leftovers.compile(["cc", *flags, *map(str, sorted(SOURCES.glob("*.c")))])

    def run(self, scripts, *all_options):
        """The lines that each script prints, for each of the options; None is a run without
        Manylane. Many wait at a time."""
        size = -(-len(scripts) // PROCESSES) or 1
        parts = [scripts[at : at + size] for at in range(0, len(scripts), size)]
        jobs = [[self.pool.submit(self.run_some, part, options) for part in parts] for options in all_options]
        return [[output for part in some for output in part.result()] for some in jobs]

    def run_some(self, scripts, options, tries=TRIES):
        command, report = [self.program], os.path.join(self.folder, f"report-{threading.get_ident()}")
        env = dict(os.environ)
        if options is not None:
            words = shlex.split(options)
            while words and re.match(r"\w+=", words[0]):
                name, _, env[name] = words.pop(0).partition("=")
            command = [MANYLANE, "run", "--quiet", "--json-file", report, *words, "--", self.program]
        text = "".join("\n".join([*lines, "end", ""]) for lines in scripts)
        done = leftovers.run(command, text, PROCESS_TIMEOUT_S, text=True, env=env)
        if options is not None:
            self.lanes += json.loads(pathlib.Path(report).read_text())["lanes"]
        outputs = [output.splitlines() for output in done.stdout.split("\n\n")[: len(scripts)]]
        outputs += [["nothing"]] * (len(scripts) - len(outputs))
        # Again, where a step had no CPU for so long that a wait may have timed out before.
        late = [nth for nth, output in enumerate(outputs) if is_late(output) and tries > 1]
        if late:
            again = self.run_some([scripts[nth] for nth in late], options, tries - 1)
            for nth, output in zip(late, again):
                outputs[nth] = output
        if done.stderr:
            outputs[0].append(done.stderr)
        return outputs


def is_late(output):
    """True if a step had no CPU in time: the output says nothing about the calls."""
    return "late" in output


def told(call, answer):
    """What a wait told of, bit by bit."""
    words = answer.split()[1:]
    if call.endswith("select"):
        return set(words)
    pairs = [word.split(":") for word in words] if call == "epoll_wait" else enumerate(words)
    return {f"{what} {bit}" for what, bits in pairs for bit in range(32) if int(bits, 16) >> bit & 1}


def is_same(native, other):
    """True if two lines are equal, or differ only by what a wait may report. A wait that is ended
    by another event checks other lanes only once in a slice, but a poll or select with a timeout of
    zero always does. So a wait may report what the step beside it sends together with earlier
    datagrams. An epoll instance reports an edge again when one of its sockets has moved to another
    lane."""
    if native == other:
        return True
    step, _, native = native.partition(" = ")
    same, _, other = other.partition(" = ")
    call, ms = (step.rstrip(":").split() + [""])[1:3]
    if same != step or call not in WAITS or "-1" in (native[:2], other[:2]):
        return False
    native, other = told(call, native), told(call, other)
    readable = (" 0", " 6") if not call.endswith("select") else tuple(f"r{fd}" for fd in range(1024))
    looks = call != "epoll_wait" and ms == "0"
    missing = not looks and all(event.endswith(readable) for event in native - other) and other
    later = ms != "0" and "+" in step.split()[0]
    return (native <= other or missing) and all(
        event.startswith("edge-") or (later and event.endswith(readable)) for event in other - native
    )


def difference(native, other):
    """The first line that differs, or None. Outputs with a late step are not compared."""
    if is_late(native) or is_late(other):
        return None
    for nth, lines in enumerate(zip(native, other)):
        if not is_same(*lines):
            return nth
    return None if len(native) == len(other) else min(len(native), len(other))


def that_differ(runner, scripts, options, tries=3):
    """Those whose outputs without Manylane are the same each time, and differ with it. Lanes are
    picked by the kernel's choice of ports: not in each run the same."""
    natives = runner.run(scripts, None, None)
    left = [nth for nth in range(len(scripts)) if natives[0][nth] == natives[1][nth]]
    differ = []
    for _ in range(tries):
        (others,) = runner.run([scripts[nth] for nth in left], options)
        differ += [nth for nth, other in zip(left, others) if difference(natives[0][nth], other) is not None]
        left = [nth for nth in left if nth not in differ]
        if not left:
            break
    return [scripts[nth] for nth in sorted(differ)]


def shrink(runner, lines, options):
    """Leaves out what can be left out: halves, quarters, and so on to single lines."""
    size = len(lines) // 2
    while size:
        parts = [range(at, min(at + size, len(lines))) for at in range(0, len(lines), size)]
        without = [[line for at, line in enumerate(lines) if at not in part] for part in parts]
        differ = that_differ(runner, without, options)
        useless = [part for part, rest in zip(parts, without) if rest in differ]
        # All of them at a time, if that still differs.
        least = [line for at, line in enumerate(lines) if not any(at in part for part in useless)]
        found = that_differ(runner, [least], options) or differ
        if len(found[0] if found else lines) == len(lines):
            size //= 2
        elif found:
            lines = found[0]
            size = min(size, len(lines) // 2 or 1)
    return lines


def report(runner, name, lines, options):
    for _ in range(TRIES):
        (native,), (other,) = runner.run([lines], None, options)
        if difference(native, other) is not None:
            break
    print(f"\nscript {name} with '{options}' differs:")
    for nth in range(max(len(native), len(other))):
        one, two = (output[nth] if nth < len(output) else "nothing" for output in (native, other))
        print(f"  {one}" if is_same(one, two) else f"- {one}\n+ {two}")
    print(f"to repeat: scripts/differential.py --script {name} --options '{options}'", flush=True)


def is_known(lines):
    """True if each of the fewest calls that still differ is needed for what docs/run.md names as a
    limit: an epoll instance that processes share tells of one lane only, after one of them has
    closed a socket in it that the other still has."""
    steps = [line.split()[1] for line in lines]
    if not {"fork", "epoll_ctl"} <= set(steps) or steps[-1] not in WAITS:
        return False
    after = steps[steps.index("fork") + 1 : -1]
    closes = ("close", "rawclose", "close_range", "dup2", "dup3", "socket")
    return len(after) == 1 and after[0] in closes


def compare(runner, names, options, counts):
    scripts = [script(name) for name in names]
    if not scripts:
        return
    natives, others = runner.run(scripts, None, options)
    counts["scripts"] += len(scripts)
    counts["calls"] += sum(map(len, scripts))
    for name, lines, native, other in zip(names, scripts, natives, others):
        counts["late"] += is_late(native) or is_late(other)
        if difference(native, other) is None:
            continue
        if that_differ(runner, [lines], options, TRIES):
            print(f"script {name} with '{options}' differs", flush=True)
            fewest = shrink(runner, lines, options)
            counts["known" if is_known(fewest) else "differ"] += 1
            report(runner, name, fewest, options)
        else:
            # Each socket has ports of its own, so what varies by chance varies without Manylane,
            # too. If it does not, it is a failure.
            again = [output for (output,) in runner.run([lines], *[None] * TRIES)]
            varies = any(output != native for output in again if not is_late(output))
            counts["vary" if varies else "differ once"] += 1
            at = difference(native, other)
            what = "varies without Manylane" if varies else f"with '{options}' differed once"
            print(f"script {name} {what}:\n- {native[at:at + 1]}\n+ {other[at:at + 1]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=20, help="duration [20]")
    parser.add_argument("seed", nargs="?", default=str(random.randrange(1 << 32)), help="seed of the scripts [random]")
    parser.add_argument("--script", metavar="SEED.N|FILE", help="compare only this script")
    parser.add_argument("--options", default=None, help="options of 'manylane run', after variables (NAME=VALUE) [default: different ones in turn]")
    args = parser.parse_args()
    counts = collections.Counter()
    leftovers.start("differential")
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(folder)
        if args.script:
            compare(runner, [args.script], args.options or "", counts)
            return counts["differ"] + counts["differ once"] > 0
        end, chunk = time.monotonic() + args.seconds, 0
        print(f"differential: seed {args.seed}", flush=True)
        for options in dict.fromkeys(OPTIONS):
            compare(runner, list(map(str, REGRESSIONS)), options, counts)
        while time.monotonic() < end:
            names = [f"{args.seed}.{chunk * CHUNK + nth}" for nth in range(CHUNK)]
            options = OPTIONS[chunk % len(OPTIONS)] if args.options is None else args.options
            compare(runner, names, options, counts)
            chunk += 1
    counts["lanes"] = runner.lanes
    print("differential:", ", ".join(f"{count} {what}" for what, count in counts.items()))
    # Without lanes it would say nothing about them.
    return counts["differ"] + counts["differ once"] > 0 or not runner.lanes


if __name__ == "__main__":
    sys.exit(main())
