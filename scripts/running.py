# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a server for bench-run.py, alone or under `manylane run`, and measures its cost."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import leftovers
import loads
from servers import SERVERS


def free_port():
    """A port that is free here, and very likely in the server's namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def processes(group):
    """Numbers of the processes of a group; what ends meanwhile may be among them."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.getpgid(pid) == group:
                yield pid
        except ProcessLookupError:
            continue


def cpu_ns(group):
    """CPU time of the processes of a group in nanoseconds, with that of threads that have ended."""
    total = 0
    for pid in processes(group):
        try:
            # The clock of another process (clock_getcpuclockid(3)): ~pid << 3, and 2 for what the
            # scheduler counts.
            total += time.clock_gettime_ns(~pid << 3 | 2)
        except OSError:
            continue
    return total


def switches(group):
    """Context switches of all threads of a group: those that wait for something, and those that are
    made to."""
    total = [0, 0]
    for pid in processes(group):
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/status") as file:
                    counts = [int(line.split()[1]) for line in file if "ctxt_switches" in line]
                total = [sum(two) for two in zip(total, counts)]
        except (OSError, ProcessLookupError):
            continue
    return total


def idle_ns():
    """Time in which no CPU did anything of this machine's: idle, waiting for disks, or with the
    hypervisor."""
    with open("/proc/stat") as stat:
        fields = [int(value) for value in stat.readline().split()[1:]]
    return (fields[3] + fields[4] + fields[7]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@functools.cache
def report_option(program):
    """The option of `run` that names the file of the report. Earlier builds have `--json FILE`."""
    command = [program, "run", "--help"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return "--json-file" if "--json-file" in text else "--json"


class Running:
    """A server that serves."""

    def __init__(self, args, kind, how, folder):
        threads = args.threads
        if how and how[0] == "--threads":
            threads, how = int(how[1]), None
        self.server = SERVERS[kind](args.address, free_port(), threads, folder)
        self.report, self.how = os.path.join(folder, "run.json"), how
        command = self.server.command()
        if how is not None:
            program, *options = how
            command = [program, "run", "--quiet", report_option(program), self.report, *options, "--", *command]
        self.log = os.path.join(folder, "log")
        with open(self.log, "w") as log:
            self.child = leftovers.popen(
                [*args.server_in.split(), "taskset", "-c", args.server_cpus, *command],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
        try:
            self.client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.client.connect((self.server.address, self.server.port))
            self.client.settimeout(2)
            self.await_server()
        except BaseException:
            self.kill()
            raise

    def await_server(self):
        if self.server.replies:
            self.server.prepare(self.ask)
            self.answer = self.ask(self.server.request)
            return
        # What is sent to nobody is not there: the first message gets through when somebody listens.
        self.until(lambda: self.client.send(self.server.message(0)) and os.path.exists(self.server.out))
        time.sleep(0.1)

    def until(self, done):
        """The first answer of `done` that is one; it fails, with what the server has said, where
        that takes too long."""
        deadline = time.monotonic() + 100
        while True:
            try:
                if answer := done():
                    return answer
            except OSError:
                pass
            if time.monotonic() > deadline or self.child.poll() is not None:
                with open(self.log) as log:
                    sys.exit(f"bench-run: {' '.join(self.child.args)} does not serve: {log.read()}")
            time.sleep(0.02)

    def ask(self, request):
        def once():
            self.client.send(request)
            return self.client.recv(4096)

        return self.until(once)

    def measure(self, args, rate, seconds):
        """One sample."""
        group = self.child.pid
        before, cpu, idle, start = switches(group), cpu_ns(group), idle_ns(), time.monotonic_ns()
        sample = loads.of(self.server, args)(self, args, rate, seconds)
        cpu, idle, wall = cpu_ns(group) - cpu, idle_ns() - idle, time.monotonic_ns() - start
        waits, made_to = (after - was for was, after in zip(before, switches(group)))
        delivered, keeps = max(sample["delivered"], 1), self.server.keeps_threads
        return {
            "offered_pps": sample["sent"] / seconds,
            "delivered_pps": sample["delivered"] / seconds,
            "loss": 1 - sample["delivered"] / max(sample["sent"], 1),
            "rx_cpu_ns": cpu / delivered,
            "total_cpu_ns": (wall * os.cpu_count() - idle) / delivered,
            "waits": waits / delivered if keeps else None,
            "preemptions": made_to / delivered if keeps else None,
            **sample,
        }

    def kill(self):
        leftovers.end(self.child)

    def end(self):
        """Ends it: lanes, why there were not more, and datagrams that came and left as frames of
        engine `xdp`."""
        self.client.close()
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(100)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        if self.how is None:
            return {"lanes": 0, "fallbacks": [], "frames": [0, 0]}
        with open(self.report) as report:
            document = json.load(report)
        rows = [row for row in document["rows"] if row["socket"] == f"{self.server.address}:{self.server.port}"]
        return {
            "lanes": len({row["lane"] for row in rows if row["lane"] is not None}),
            "fallbacks": [one["reason"] for one in document["fallbacks"]],
            "frames": [sum(row.get(way, 0) for row in rows) for way in ("delivered_by_bypass", "sent_by_bypass")],
        }
