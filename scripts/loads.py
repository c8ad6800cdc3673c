# SPDX-License-Identifier: MIT OR Apache-2.0
"""Load generators of bench-run.py: each sends requests for a time, and returns their outcomes."""

import json
import os
import re
import socket
import sys
import time

import leftovers


def run(args, *command):
    """Runs a command on the sender's CPUs, and returns its output."""
    command = ["taskset", "-c", args.sender_cpus, *command]
    done = leftovers.run(command)
    if done.returncode:
        sys.exit(f"bench-run: {' '.join(command)}: {done.stderr.decode()}")
    return done.stdout.decode()


def machine(args):
    return json.loads(run(args, args.manylane, "send", "127.0.0.1:9", "--count", "1", "--json"))["machine"]


def by_send(running, args, rate, seconds):
    """The same request by schedule, from many flows; the right answer is known to the byte."""
    server = running.server
    command = [args.manylane, "send", f"{server.address}:{server.port}", "--payload", "hex:" + server.request.hex()]
    command += ["--expect", server.expected(running.answer), "--rate", str(int(rate)), "--duration", f"{seconds}s"]
    command += ["--flows", str(args.flows), "--timeout", f"{args.timeout}s", "--json"]
    command += ["--busy-poll"] if args.busy_poll else []
    command += args.client.split()
    row = json.loads(run(args, *command))["rows"][0]
    return {
        "sent": row["asked"],
        "delivered": row["answered"],
        "wrong": row["wrong"] + row["unexpected"],
        "twice": row["duplicates"],
        "p50_ns": row["latency_ns"]["p50"],
        "p99_ns": row["latency_ns"]["p99"],
    }


def by_numbers(running, args, rate, seconds):
    """Numbered messages by schedule, from many flows, to a server that answers nothing: lines of
    its file are counted."""
    server, total = running.server, int(rate * seconds)
    flows = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(args.flows)]
    for flow in flows:
        flow.connect((server.address, server.port))
    start, sent = time.monotonic(), 0
    with open(server.out, "rb") as file:
        file.seek(0, os.SEEK_END)
        while sent < total:
            due = min(total, int((time.monotonic() - start) * rate) + 1)
            for number in range(sent, due):
                flows[number % len(flows)].send(server.message(number))
            sent = due
            time.sleep(20e-6)
        # Until all are there, or none has come for as long as an answer may take.
        text, since = b"", time.monotonic()
        while text.count(b"\n") < total and time.monotonic() - since < args.timeout:
            if more := file.read():
                text, since = text + more, time.monotonic()
            else:
                time.sleep(0.005)
        # A line that came twice would be here by now.
        time.sleep(0.02)
        text += file.read()
    for flow in flows:
        flow.close()
    lines = [re.fullmatch(rb"host tag: message (\d+)", line) for line in text.splitlines()]
    found = [int(line[1]) for line in lines if line]
    return {
        "sent": sent,
        "delivered": len(set(found)),
        "wrong": len(lines) - len(found),
        "twice": len(found) - len(set(found)),
        "p50_ns": None,
        "p99_ns": None,
    }


def number(text, name):
    """The first number in the line that begins with a name."""
    line = next((line for line in text.splitlines() if line.strip().startswith(name)), None)
    if line is None:
        sys.exit(f"bench-run: cannot find '{name}' in the output: {text}")
    return float(re.search(r"[\d.]+", line.split(name, 1)[1])[0])


def by_dnsperf(running, args, rate, seconds):
    """Questions for all names; so many as the server answers, 64 on their way, unless there is a
    rate."""
    server = running.server
    command = ["dnsperf", "-s", server.address, "-p", str(server.port), "-d", server.questions(), "-q", "64", "-c", "16"]
    said = run(args, *command, "-l", str(max(1, round(seconds))), "-t", "5", *(["-Q", str(int(rate))] if rate else []))
    return {
        "sent": int(number(said, "Queries sent:")),
        "delivered": int(number(said, "Queries completed:")),
        "wrong": 0,
        "twice": 0,
        "p50_ns": None,
        "p99_ns": None,
        "mean_ns": number(said, "Average Latency (s):") * 1e9,
    }


def by_kxdpgun(running, args, rate, seconds):
    """Questions for all names as frames, past the sender's stack: needs root, and a device with one
    queue (--device)."""
    server = running.server
    command = ["kxdpgun", "-t", str(max(1, round(seconds))), "-Q", str(int(rate)), "-i", server.questions()]
    # It takes replies from as many queues as it has threads, and these stay on CPUs of its choice
    # unless it is told.
    command += ["-F", args.sender_cpus.split(",")[0] + "s0", "-p", str(server.port), "-I", args.device]
    # It ends without a word when the device is not free of its last run yet.
    said = next((said for said in (run(args, *command, server.address) for _ in range(5)) if said), "")
    return {
        "sent": int(number(said, "total queries:")),
        "delivered": int(number(said, "total replies:")),
        "wrong": 0,
        "twice": 0,
        "p50_ns": None,
        "p99_ns": None,
    }


LOADS = {"send": by_send, "dnsperf": by_dnsperf, "kxdpgun": by_kxdpgun}


def of(server, args):
    """The load for a server."""
    return LOADS[args.load] if server.replies else by_numbers
