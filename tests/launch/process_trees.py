"""Process trees to end, and a way to wait for them.

`tree.py DIR MODE` writes one file DIR/ROLE for each process it starts, with the pid in it:
  main        itself
  child       a plain child
  session     a child with a session of its own (setsid)
  daemon      double-forked with setsid: an orphan as soon as it is there
When all are there it does what MODE says: wait, or end with that exit code. A role named in
the environment's STUBBORN ignores SIGTERM.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

TREE = """\
import os, signal, sys, time
folder, mode = sys.argv[1:]
ROLES = ("main", "child", "session", "daemon")

def begin(role):
    if role == os.environ.get("STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    temporary = f"{folder}/.{role}"
    with open(temporary, "w") as file:
        file.write(str(os.getpid()))
    os.rename(temporary, f"{folder}/{role}")

def stay(role):
    begin(role)
    while True:
        signal.pause()

if os.fork() == 0:
    stay("child")
if os.fork() == 0:
    os.setsid()
    stay("session")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        stay("daemon")
    os._exit(0)
begin("main")
while not all(os.path.exists(f"{folder}/{role}") for role in ROLES):
    time.sleep(0.01)
print("all are there", flush=True)
open(f"{folder}/ready", "w").close()
while mode == "wait":
    signal.pause()
sys.exit(int(mode))
"""
ROLES = ("main", "child", "session", "daemon")


def until(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
    """Poll `condition`; fails naming `what` after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.02)


def is_alive(pid: int, marker: str) -> bool:
    """Whether `pid` runs and is still the process with `marker` in its command line."""
    try:
        return marker in Path(f"/proc/{pid}/cmdline").read_bytes().decode()  # '' for a zombie
    except (FileNotFoundError, ProcessLookupError):
        return False


class Tree:
    """One process tree, run by `tree.argv(mode)`."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script = script
        self.folder = folder

    def argv(self, mode: str) -> list[str]:
        return [sys.executable, "-S", str(self.script), str(self.folder), mode]

    def wait_ready(self) -> None:
        until((self.folder / "ready").exists, f"the tree in {self.folder}")

    def pid(self, role: str) -> int:
        return int((self.folder / role).read_text())

    def alive(self) -> list[str]:
        """Roles that were started and still run."""
        roles = [role for role in ROLES if (self.folder / role).exists()]
        return [role for role in roles if is_alive(self.pid(role), str(self.folder))]

    def wait_gone(self) -> None:
        until(lambda: not self.alive(), f"the end of the tree in {self.folder}")
