#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of a request to an unmodified server, alone and under `manylane run`:
bench-run.py [options]

First, the sustained rate of each variant is searched: the highest at which for two seconds no request
is lost and the 99th percentile of the latency stays below 5 ms. Then rounds are interleaved, at one
rate for all variants. Results are medians with their spread. Several servers are measured one after
the other. Standard output has one JSON document (manylane.bench.run.v1), standard error the
progress. Requests run over loopback, or between two
network namespaces (--address, --server-in; this script runs in the client's). Server and client have
separate CPUs. CPU time is that of the server's processes; softirqs run on the client's CPU, and are
included in total_cpu_ns.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile

# No __pycache__ beside the sources.
sys.dont_write_bytecode = True

import leftovers
import loads
from running import Running
from servers import SERVERS

# Limit of the 99th percentile at a sustained rate, and the length of a trial in seconds.
P99_MAX_NS = 5_000_000
TRIAL_SECONDS = 2
# Trials that may fail at a sustained rate: others use this machine, too.
TRIALS = 3
# The search raises the rate by this factor, and then halves the interval so many times.
RATE_FACTOR = 1.25
BISECTIONS = 3
FIGURES = ("offered_pps", "delivered_pps", "loss", "rx_cpu_ns", "total_cpu_ns", "waits", "preemptions", "p50_ns", "p99_ns")


def seconds(text):
    """With or without the unit."""
    return float(text.removesuffix("s"))


def say(text):
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def running(args, kind, how, ends):
    """A server that serves; how it ended is put at the end of `ends`."""
    with tempfile.TemporaryDirectory() as folder:
        one = Running(args, kind, how, folder)
        try:
            yield one
        except BaseException:
            one.kill()
            raise
        ends.append(one.end())


def is_sustained(sample, rate):
    """True if a sample at this rate lost nothing and kept the limit of the latency."""
    answered = sample["delivered"] == sample["sent"] and sample["offered_pps"] >= 0.98 * rate
    return answered and (sample["p99_ns"] or 0) < P99_MAX_NS


def sustained_rate(args, kind, how):
    """The highest sustained rate, within 3 %; 0 if the lowest one tried is not sustained."""
    with running(args, kind, how, []) as one:
        def sustains(rate):
            return any(is_sustained(one.measure(args, rate, TRIAL_SECONDS), rate) for _ in range(TRIALS))

        best, rate = 0, args.lowest or SERVERS[kind].lowest
        while sustains(rate):
            best, rate = rate, rate * RATE_FACTOR
        for _ in range(BISECTIONS if best else 0):
            middle = (best + rate) / 2
            best, rate = (middle, rate) if sustains(middle) else (best, middle)
        return best


def one_round(args, kind, variants, rate):
    """Samples of each variant, in turns; and how each ended. Not both at a time with XDP programs,
    which are on devices that others use."""
    apart = any(how and "xdp" in how for _, how in variants)
    samples, ends = {name: [] for name, _ in variants}, {name: [] for name, _ in variants}
    for together in [[one] for one in variants] if apart else [variants]:
        with contextlib.ExitStack() as stack:
            servers = [(name, stack.enter_context(running(args, kind, how, ends[name]))) for name, how in together]
            for _, server in servers:
                server.measure(args, rate, args.warm_up)
            for turn in range(args.samples):
                for name, server in servers if turn % 2 == 0 else servers[::-1]:
                    samples[name].append(server.measure(args, rate, args.seconds))
    return samples, {name: last[-1] for name, last in ends.items()}


def measure(args, kind, variants, rate):
    """Rows of one server."""
    sustained = {}
    if not rate:
        for name, how in variants:
            sustained[name] = sustained_rate(args, kind, how)
            say(f"{kind}, {name}: sustains {sustained[name]:.0f} requests per second")
        rate = 0.5 * (min(sustained.values()) or args.lowest or SERVERS[kind].lowest)
    samples, ends = {name: [] for name, _ in variants}, {}
    for nth in range(args.rounds):
        found, ends = one_round(args, kind, variants if nth % 2 == 0 else variants[::-1], rate)
        for name, some in found.items():
            samples[name] += [{"round": nth * args.samples + turn, **one} for turn, one in enumerate(some)]
            cost = statistics.median(one["rx_cpu_ns"] for one in some)
            lost = sum(one["sent"] - one["delivered"] for one in some)
            say(f"{kind}, round {nth}: {name}: {cost:.0f} ns of the server, {lost} lost of {sum(one['sent'] for one in some)}")
    rows = []
    for name, _ in variants:
        row = {"receiver": f"{kind} {name}", "server": kind, "threads": args.threads, "rate": rate}
        row["sustained_pps"] = sustained.get(name)
        row |= {"size": len(SERVERS[kind].request), **ends[name]}
        for key in FIGURES:
            values = [sample[key] for sample in samples[name] if sample[key] is not None]
            row[key] = statistics.median(values) if values else None
        row["rx_cpu_ns_min"] = min(sample["rx_cpu_ns"] for sample in samples[name])
        row["rx_cpu_ns_max"] = max(sample["rx_cpu_ns"] for sample in samples[name])
        # Of rounds, not of medians: what disturbs one round disturbs its neighbours, too.
        pairs = zip(samples[name], samples[variants[0][0]])
        row["of_alone"] = statistics.median(one["rx_cpu_ns"] / alone["rx_cpu_ns"] for one, alone in pairs)
        row |= {key: sum(sample[key] for sample in samples[name]) for key in ("sent", "delivered", "wrong", "twice")}
        rows.append({**row, "samples": samples[name]})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manylane", default="target/release/manylane", help="path of manylane")
    parser.add_argument("--before", metavar="PROGRAM", help="an earlier build of manylane, also measured with each --how")
    parser.add_argument(
        "--server", action="append", metavar="NAME[=RATE]",
        help=f"server to measure, and its rate in requests per second; may be repeated; all: each of {', '.join(SERVERS)} [memcached]",
    )
    parser.add_argument("--threads", type=int, default=4, help="threads of the server")
    parser.add_argument("--alone", action="append", default=[], metavar="THREADS", help="also measure the server alone with this number of threads; may be repeated")
    parser.add_argument("--how", action="append", help="options of manylane run to compare, as one word; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds; each starts every server once")
    parser.add_argument("--samples", type=int, default=1, help="samples per start, in turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a sample")
    parser.add_argument("--warm-up", type=float, default=2, help="seconds of load before the first sample: delays settle within about one")
    parser.add_argument("--rate", type=float, help="requests per second of the rounds, without a search [half of the lowest sustained rate]")
    parser.add_argument("--lowest", type=float, help="first rate of the search for the sustained rate [depends on the server]")
    parser.add_argument("--flows", type=int, default=64, help="number of flows")
    parser.add_argument("--timeout", type=seconds, default=1.0, metavar="SECONDS", help="time after which a reply counts as lost")
    parser.add_argument("--load", choices=loads.LOADS, default="send", help="load generator; others than send are for DNS servers")
    parser.add_argument("--busy-poll", action="store_true", help="the client polls its device for replies, so that the server does not wake it")
    parser.add_argument("--client", default="", metavar="OPTIONS", help="more options of 'manylane send', such as '--engine xdp'")
    parser.add_argument("--device", help="device that kxdpgun sends through")
    parser.add_argument("--address", default="127.0.0.1", help="address of the server")
    parser.add_argument("--server-in", default="", help="command that starts the server, such as 'ip netns exec NAME'")
    ours = sorted(os.sched_getaffinity(0))
    parser.add_argument("--server-cpus", default=str(ours[0]), metavar="LIST", help="CPUs of the server, as for taskset")
    parser.add_argument("--sender-cpus", default=str(ours[-1]), metavar="LIST", help="CPUs of the client, as for taskset")
    args = parser.parse_args()
    args.manylane = os.path.abspath(args.manylane)
    programs = {"run": args.manylane}
    if args.before:
        programs["before"] = os.path.abspath(args.before)
    # This script must not take CPU time from the server.
    os.sched_setaffinity(0, {int(cpu) for cpu in args.sender_cpus.split(",")})
    chosen = {}
    for word in args.server or ["memcached"]:
        name, _, rate = word.partition("=")
        if name != "all" and name not in SERVERS:
            parser.error(f"--server {name}: expected all, or one of {', '.join(SERVERS)}")
        for kind in SERVERS if name == "all" else [name]:
            chosen[kind] = float(rate or 0) or args.rate
    variants = [("alone", None)]
    variants += [(f"alone, {count} threads", ["--threads", count]) for count in args.alone]
    for how in args.how or ["--engine mmsg"]:
        variants += [(f"{name} {how}", [program, *how.split()]) for name, program in programs.items()]

    leftovers.start("bench-run")
    rows = []
    for kind, rate in chosen.items():
        rows += measure(args, kind, variants, rate)
    settings = {key: value for key, value in vars(args).items() if key not in ("manylane", "before")}
    settings |= {"command": " ".join(["bench-run.py", *sys.argv[1:]])}
    document = {"schema": "manylane.bench.run.v1", "machine": loads.machine(args), "settings": settings, "rows": rows}
    json.dump(document, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
