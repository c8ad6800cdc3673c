# SPDX-License-Identifier: MIT OR Apache-2.0
"""The servers that bench-run.py measures, with their commands, requests and expected replies.

Configurations and programs are those of the tests (crates/manylane-cli/tests/servers)."""

import functools
import os
import re
import struct
import sys
import tempfile

import leftovers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../crates/manylane-cli/tests/servers")
PLACES = ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/sbin"]


def find(program, package):
    """Returns the path of a program, or exits and names the package to install."""
    # The package's own program first, because a wrapper may not end with it.
    files = [os.path.join(place, program) for place in PLACES]
    file = next((file for file in files if os.path.isfile(file)), None)
    return file or sys.exit(f"bench-run: {program} is missing: apt-get install {package}")


def filled(name, folder, **words):
    """A configuration of the tests, with what stands for each word between two @: its path."""
    with open(os.path.join(HERE, "programs", name)) as file:
        text = file.read()
    for word, value in {**words, "FOLDER": folder}.items():
        text = text.replace(f"@{word}@", str(value))
    path = os.path.join(folder, name)
    with open(path, "w") as out:
        out.write(text)
    return path


class Server:
    """One server, at an address."""

    program, package = None, None
    # Where the search for its sustained rate begins, in requests per second.
    lowest = 10_000
    # Whether it answers. One that does not has a file `out`, with a line for each message.
    replies = True
    # Whether threads come and go: then nobody knows afterwards how often they have waited.
    keeps_threads = True
    request = b"request 7"

    def __init__(self, address, port, threads, folder):
        self.address, self.port, self.threads, self.folder = address, port, threads, folder
        self.file = find(self.program, self.package)

    def command(self):
        raise NotImplementedError

    def prepare(self, ask):
        """Before requests are asked for; `ask` returns the answer to one."""

    def expected(self, answer):
        """What `manylane send` is to expect, by the answer that one request had."""
        return "hex:" + answer.hex()


class Memcached(Server):
    """All threads wait, each on an epoll instance of its own, for one socket."""

    program = package = "memcached"
    request = struct.pack("!4H", 7, 0, 1, 0) + b"get key\r\n"

    def command(self):
        port = str(self.port)
        return [self.file, "-U", port, "-p", port, "-l", self.address, "-t", str(self.threads), "-u", "root", "-m", "64"]

    def prepare(self, ask):
        stored = ask(struct.pack("!4H", 1, 0, 1, 0) + b"set key 0 0 10\r\n0123456789\r\n")
        assert stored.endswith(b"STORED\r\n"), stored


class Rsyslog(Server):
    """Each thread of imudp waits on an epoll instance of its own. It answers nothing: its file is
    looked at."""

    program, package, replies = "rsyslogd", "rsyslog", False

    def command(self):
        self.out = os.path.join(self.folder, "out")
        named = {"ADDRESS": self.address, "PORT": self.port, "THREADS": self.threads, "OUT": self.out}
        return [self.file, "-n", "-f", filled("rsyslog.conf", self.folder, **named), "-i", self.out + ".pid"]

    @staticmethod
    def message(number):
        return b"<13>Jan  1 00:00:00 host tag: message %d" % number


class Kamailio(Server):
    """Its children are forked when the socket is bound, and each of them blocks in a receive on
    it."""

    program = package = "kamailio"
    lowest = 4_000
    request = (
        b"OPTIONS sip:test@127.0.0.1 SIP/2.0\r\nVia: SIP/2.0/UDP 127.0.0.1;rport;branch=z9hG4bK7\r\n"
        b"From: <sip:a@127.0.0.1>;tag=t7\r\nTo: <sip:b@127.0.0.1>\r\nCall-ID: call7\r\nCSeq: 7 OPTIONS\r\n"
        b"Max-Forwards: 70\r\nContent-Length: 0\r\n\r\n"
    )

    def command(self):
        named = {"ADDRESS": self.address, "PORT": self.port, "THREADS": self.threads}
        options = ["-f", filled("kamailio.cfg", self.folder, **named), "-DD", "-E", "-P", f"{self.folder}/pid"]
        return [self.file, *options, "-Y", self.folder, "-w", self.folder, "-m", "32", "-M", "4"]

    def expected(self, answer):
        """All but the asker's port, which is another one for each flow."""
        head, port, rest = re.split(rb"(?<=;rport=)(\d+)", answer, maxsplit=1)
        return "hex:" + head.hex() + "??" * len(port) + rest.hex()


class Dns(Server):
    """Each asks for one address of a zone."""

    reuseport = "yes"
    request = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + b"\5host1\7example\4test\0\0\1\0\1"

    def configured(self, name):
        with open(os.path.join(self.folder, "zone"), "w") as zone:
            zone.write("$ORIGIN example.test.\n$TTL 3600\n@ SOA ns hostmaster 1 3600 600 86400 3600\n@ NS ns\nns A 192.0.2.1\n")
            zone.writelines(f"host{nth} A 192.0.2.{nth}\n" for nth in range(100))
        data = "\n".join(f' local-data: "host{nth}.example.test. 3600 A 192.0.2.{nth}"' for nth in range(100))
        named = {"ADDRESS": self.address, "PORT": self.port, "THREADS": self.threads}
        return filled(name, self.folder, **named, REUSEPORT=self.reuseport, DATA=data)

    def questions(self):
        """A file for dnsperf and kxdpgun."""
        path = os.path.join(self.folder, "questions")
        with open(path, "w") as out:
            out.writelines(f"host{nth}.example.test A\n" for nth in range(100))
        return path


class Nsd(Dns):
    """The server's own way: a socket for each process."""

    program = package = "nsd"

    def command(self):
        return [self.file, "-d", "-c", self.configured("nsd.conf")]


class NsdShared(Nsd):
    """Its processes share one socket."""

    reuseport = "no"


class Knot(Dns):
    """A socket for each thread."""

    program, package = "knotd", "knot"

    def command(self):
        return [self.file, "-c", self.configured("knot.conf")]


class Unbound(Dns):
    """A socket for each thread."""

    program = package = "unbound"

    def command(self):
        return [self.file, "-d", "-c", self.configured("unbound.conf")]


class UnboundShared(Unbound):
    """Its threads share one socket."""

    reuseport = "no"


class Script(Server):
    """A few lines of a language with a runtime of its own."""

    program = package = "python3"
    script = None
    lowest = 2_000

    def command(self):
        return [self.file, os.path.join(HERE, "programs", self.script), str(self.port), self.address]


class Threading(Script):
    """One thread receives, and starts one for each request."""

    script, lowest, keeps_threads = "threading_server.py", 1_000, False


class Asyncio(Script):
    """One thread."""

    script = "asyncio_server.py"


class Node(Script):
    """One thread."""

    program, package, script = "node", "nodejs", "dgram_server.js"


class C(Server):
    """Threads share one socket, and wait for it by whatever the name says."""

    program, package, how = "cc", "gcc", "block"

    @staticmethod
    @functools.cache
    def built(cc):
        folder = tempfile.TemporaryDirectory()
        program = os.path.join(folder.name, "server")
        leftovers.compile([cc, "-O1", "-pthread", "-o", program, os.path.join(HERE, "server.c")])
        # The folder lives as long as what is returned.
        return folder, program

    def command(self):
        # No work that sleeps: what is measured is what the calls cost.
        return [self.built(self.file)[1], str(self.port), self.how, str(self.threads), self.address, "0"]


class CPoll(C):
    how = "poll"


class CSelect(C):
    how = "select"


class CEpoll(C):
    how = "epoll"


SERVERS = {
    "memcached": Memcached,
    "rsyslog": Rsyslog,
    "kamailio": Kamailio,
    "nsd": Nsd,
    "nsd-shared": NsdShared,
    "knot": Knot,
    "unbound": Unbound,
    "unbound-shared": UnboundShared,
    "python-threading": Threading,
    "python-asyncio": Asyncio,
    "node": Node,
    "c-block": C,
    "c-poll": CPoll,
    "c-select": CSelect,
    "c-epoll": CEpoll,
}
