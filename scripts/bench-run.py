#!/usr/bin/env python3
# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a request costs an unmodified server, alone and under `manylane run`: bench-run.py [options]

Interleaved rounds at one rate, at which nobody loses anything; medians with their spread. One JSON document
(manylane.bench.run.v1) on standard output, progress on standard error. The server and its requests are on loopback, or
between two network namespaces (--address, --server-in; this script runs in the one that asks), on processors of their own: CPU time is that of the server's threads (schedstat), softirqs are the sender's and in total_cpu_ns.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

LOSS_LIMIT = 0.001


def say(text):
    print(text, file=sys.stderr, flush=True)


ADDRESS = "127.0.0.1"


def free_port():
    """One that is free here, and to all probability there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Memcached:
    name, request = "memcached", struct.pack("!4H", 7, 0, 1, 0) + b"get key\r\n"

    def __init__(self, threads, folder):
        self.threads, self.port = threads, free_port()

    def command(self):
        port = str(self.port)
        return ["memcached", "-U", port, "-p", port, "-l", ADDRESS, "-t", str(self.threads), "-u", "root"]

    def prepare(self, ask):
        stored = ask(struct.pack("!4H", 1, 0, 1, 0) + b"set key 0 0 10\r\n0123456789\r\n")
        assert stored.endswith(b"STORED\r\n"), stored


class Nsd:
    """The server's own way: a socket for each process."""

    name, reuseport = "nsd", "yes"
    request = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + b"\4host\7example\4test\0\0\1\0\1"

    def __init__(self, threads, folder):
        self.port = free_port()
        zone = os.path.join(folder, "zone")
        with open(zone, "w") as out:
            out.write("$ORIGIN example.test.\n$TTL 60\n@ SOA ns h 1 60 60 60 60\n@ NS ns\nns A 192.0.2.1\nhost A 192.0.2.2\n")
        self.configuration = os.path.join(folder, "nsd.conf")
        with open(self.configuration, "w") as out:
            out.write(
                f'server:\n ip-address: {ADDRESS}@{self.port}\n server-count: {threads}\n username: ""\n chroot: ""\n'
                f' zonesdir: "{folder}"\n pidfile: "{folder}/nsd.pid"\n database: ""\n zonelistfile: "{folder}/zone.list"\n'
                f' xfrdfile: "{folder}/xfrd.state"\n reuseport: {self.reuseport}\n rrl-ratelimit: 0\n'
                f'remote-control:\n control-enable: no\nzone:\n name: example.test\n zonefile: "{zone}"\n'
            )

    def command(self):
        return ["nsd", "-d", "-c", self.configuration]

    def prepare(self, ask):
        pass


class NsdShared(Nsd):
    """Its processes share one socket."""

    name, reuseport = "nsd-shared", "no"


SERVERS = {one.name: one for one in (Memcached, Nsd, NsdShared)}


def of_threads(group, name):
    """Lines of the file `name` of each thread of a process group; what ends meanwhile is left out."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(pid)) != group:
                continue
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/{name}") as file:
                    yield file.read().splitlines()
        except (OSError, ProcessLookupError):
            continue


def cpu_ns(group):
    """CPU time of all threads of a process group, in nanoseconds."""
    return sum(int(lines[0].split()[0]) for lines in of_threads(group, "schedstat"))


def switches(group):
    """Context switches of all threads of a process group: those that wait for something, and those that are made to."""
    total = [0, 0]
    for lines in of_threads(group, "status"):
        counts = [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
        total = [sum(two) for two in zip(total, counts)]
    return total


def idle_ns():
    with open("/proc/stat") as stat:
        fields = [int(value) for value in stat.readline().split()[1:]]
    return (fields[3] + fields[4] + fields[7]) * 10_000_000


class Running:
    """A server that serves."""

    def __init__(self, args, kind, how, folder):
        threads = args.threads
        if how and how[0] == "--threads":
            threads, how = int(how[1]), None
        self.server = SERVERS[kind](threads, folder)
        command = self.server.command()
        self.report = os.path.join(folder, "run.json")
        if how:
            command = [args.manylane, "run", "--quiet", "--json", self.report, *how, "--", *command]
        self.child = subprocess.Popen(
            [*args.server_in.split(), "taskset", "-c", args.server_cpus, *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
        self.how = how
        try:
            self.client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.client.connect((ADDRESS, self.server.port))
            self.client.settimeout(2)
            self.server.prepare(self.ask)
            self.answer = self.ask(self.server.request)
        except BaseException:
            self.end()
            raise

    def ask(self, request):
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client.send(request)
                return self.client.recv(4096)
            except OSError:
                if time.monotonic() > deadline or self.child.poll() is not None:
                    raise
                time.sleep(0.02)

    def measure(self, args, rate, seconds):
        command = ["taskset", "-c", args.sender_cpus, args.manylane, "send", f"{ADDRESS}:{self.server.port}"]
        command += ["--payload", "hex:" + self.server.request.hex(), "--expect", "hex:" + self.answer.hex()]
        command += ["--rate", str(int(rate)), "--duration", f"{seconds}s", "--flows", str(args.flows), "--json"]
        before = switches(self.child.pid)
        cpu, idle, start = cpu_ns(self.child.pid), idle_ns(), time.monotonic_ns()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            sys.exit(f"bench-run: {' '.join(command)}: {done.stderr.decode()}")
        cpu, idle, wall = cpu_ns(self.child.pid) - cpu, idle_ns() - idle, time.monotonic_ns() - start
        waits, made_to = (after - was for was, after in zip(before, switches(self.child.pid)))
        document = json.loads(done.stdout)
        row = document["rows"][0]
        answered = max(row["answered"], 1)
        return document["machine"], {
            "offered_pps": row["sent"] / seconds if "sent" in row else row["asked"] / seconds,
            "delivered_pps": row["answered"] / seconds,
            "loss": 1 - row["answered"] / max(row["asked"], 1),
            "rx_cpu_ns": cpu / answered,
            "total_cpu_ns": (wall * os.cpu_count() - idle) / answered,
            "waits": waits / answered,
            "preemptions": made_to / answered,
            "sent": row["asked"],
            "delivered": row["answered"],
            "p50_ns": row["latency_ns"]["p50"],
            "p99_ns": row["latency_ns"]["p99"],
        }

    def end(self):
        """Ends it: lanes, and why there were not more."""
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()
        if not self.how:
            return 0, []
        with open(self.report) as report:
            document = json.load(report)
        address = f"{ADDRESS}:{self.server.port}"
        lanes = {row["lane"] for row in document["rows"] if row["socket"] == address and row["lane"] is not None}
        return len(lanes), [one["reason"] for one in document["fallbacks"]]


def no_loss_rate(args, kind, how):
    """The highest rate of a row, each 1.25 times the one before, at which no more than LOSS_LIMIT is lost."""
    best, rate = 0, args.lowest
    with tempfile.TemporaryDirectory() as folder:
        running = Running(args, kind, how, folder)
        try:
            while True:
                # Somebody else's pause is no reason: only what is lost three times in a row counts.
                for _ in range(3):
                    _, sample = running.measure(args, rate, 0.5)
                    good = sample["loss"] <= LOSS_LIMIT and sample["offered_pps"] >= 0.95 * rate
                    if good:
                        break
                if not good:
                    return best or rate
                best, rate = rate, rate * 1.25
        finally:
            running.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manylane", default="target/release/manylane", help="the program")
    parser.add_argument("--server", choices=SERVERS, default="memcached")
    parser.add_argument("--threads", type=int, default=4, help="of the server")
    parser.add_argument("--alone", action="append", default=[], metavar="THREADS", help="the server alone with so many threads, too")
    parser.add_argument("--how", action="append", help="options of manylane run that are compared, as one word each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a sample")
    parser.add_argument("--rate", type=float, help="requests per second [0.7 of the lowest no-loss rate]")
    parser.add_argument("--lowest", type=float, default=10_000, help="where the search for the no-loss rate begins")
    parser.add_argument("--flows", type=int, default=64)
    parser.add_argument("--address", default=ADDRESS, help="of the server")
    parser.add_argument("--server-in", default="", help="what the server is started by, such as 'ip netns exec NAME'")
    parser.add_argument("--server-cpus", default="0")
    parser.add_argument("--sender-cpus", default="1")
    args = parser.parse_args()
    args.manylane = os.path.abspath(args.manylane)
    globals()["ADDRESS"] = args.address
    variants = [("alone", None)]
    variants += [(f"alone, {count} threads", ["--threads", count]) for count in args.alone]
    variants += [("run " + how, how.split()) for how in args.how or ["--engine mmsg"]]

    notes, rate = [], args.rate
    if not rate:
        rates = {name: no_loss_rate(args, args.server, how) for name, how in variants}
        notes = [f"no-loss rate of {name}: {value:.0f} requests per second" for name, value in rates.items()]
        for note in notes:
            say(note)
        rate = 0.7 * min(rates.values())
    samples = {name: [] for name, _ in variants}
    lanes, machine = {}, None
    for number in range(args.rounds):
        for name, how in variants if number % 2 == 0 else variants[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                running = Running(args, args.server, how, folder)
                try:
                    running.measure(args, rate, 0.3)
                    machine, sample = running.measure(args, rate, args.seconds)
                finally:
                    lanes[name] = running.end()
            samples[name].append({"round": number, **sample})
            say(f"round {number}: {name}: {sample['rx_cpu_ns']:.0f} ns of the server, {sample['waits']:.2f} waits, loss {sample['loss']:.5f}")
    rows = []
    for name, _ in variants:
        row = {"receiver": f"{args.server} {name}", "threads": args.threads, "lanes": lanes[name][0]}
        row |= {"size": len(SERVERS[args.server].request), "fallbacks": lanes[name][1]}
        for key in ("offered_pps", "delivered_pps", "loss", "rx_cpu_ns", "total_cpu_ns", "waits", "preemptions", "p50_ns", "p99_ns"):
            row[key] = statistics.median(sample[key] for sample in samples[name])
        row["rx_cpu_ns_min"] = min(sample["rx_cpu_ns"] for sample in samples[name])
        row["rx_cpu_ns_max"] = max(sample["rx_cpu_ns"] for sample in samples[name])
        rows.append({**row, "samples": samples[name]})
    settings = {key: value for key, value in vars(args).items() if key != "manylane"}
    settings |= {"command": " ".join(["bench-run.py", *sys.argv[1:]]), "rate": rate, "notes": notes}
    json.dump({"schema": "manylane.bench.run.v1", "machine": machine, "settings": settings, "rows": rows}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
