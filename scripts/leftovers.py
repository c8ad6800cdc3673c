# SPDX-License-Identifier: MIT OR Apache-2.0
"""Programs and temporary files of a script, which end with it.

A second process, the guard, outlives the script, also when the script is killed (SIGKILL). It then
kills the programs that are left and removes the folder of temporary files.
"""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# Seconds that killed processes have to disappear, before their files are removed.
KILL_TIMEOUT = 2

# The pipe to the guard, which reads a line for each program that starts (+) or has ended (-).
_guard = None
# Process groups of the programs that have not ended.
_groups = set()
# A signal ends the script: threads start no more programs.
_is_ending = False


def start(name):
    """Starts the guard. From here on temporary files are in a folder that it removes, and signals
    raise SystemExit."""
    global _guard
    # Before the first folder, so that no signal comes in between.
    for number in SIGNALS:
        # nohup ignores SIGHUP, and a shell ignores SIGINT in its background jobs.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _exit)
    folder = tempfile.mkdtemp(prefix=f"{name}.manylane-")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        _watch(reader, folder)
    os.close(reader)
    _guard = os.fdopen(writer, "w", buffering=1)
    # Of this script and its programs, such as compilers.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    atexit.register(_finish, pid)


def _exit(number, _frame):
    global _is_ending
    # A second signal must not interrupt the clean-up.
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    _is_ending = True
    # Threads wait for them.
    for group in list(_groups):
        _kill_group(group)
    sys.exit(128 + number)


def _finish(pid):
    _guard.close()
    os.waitpid(pid, 0)


def _watch(reader, folder):
    """The guard."""
    # Signals to the group of the script, such as Ctrl-C, are not meant for it; nor is it to keep
    # pipes open.
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    groups = set()
    with os.fdopen(reader) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        _kill_group(group)
    deadline = time.monotonic() + KILL_TIMEOUT
    while any(map(_kill_group, groups)) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _kill_group(group):
    """True if there was a process to kill."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def popen(command, **options):
    """Starts a program in a session of its own. `end` has to follow."""
    if _is_ending:
        sys.exit(1)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_record, **options)
    _groups.add(child.pid)
    return child


def _record():
    """Runs in the child before it executes the program. If the script is killed meanwhile, the
    guard still reads the line: the pipe is open until then."""
    os.write(_guard.fileno(), f"+{os.getpid()}\n".encode())


def end(child):
    """Kills what is left of a program and the processes that it started."""
    _kill_group(child.pid)
    child.wait()
    _groups.discard(child.pid)
    _guard.write(f"-{child.pid}\n")


def run(command, input=None, timeout=None, **options):
    """As subprocess.run, with pipes for all three. All processes of the program end with it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = popen(command, **pipes, **options)
    with child:
        try:
            stdout, stderr = child.communicate(input, timeout)
        finally:
            end(child)
    return subprocess.CompletedProcess(command, child.returncode, stdout, stderr)


def compile(command):
    """Runs a compiler. Its messages end the script if it fails."""
    done = run(command, text=True)
    if done.returncode:
        sys.exit(done.stderr)
