"""The guard leaves nothing behind: not a child, not one with its own session, not a daemon."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_trees import is_alive, until

import megarl.launch.guard
from megarl.launch.process import Process, stop_all

GUARD = str(Path(megarl.launch.guard.__file__))
LAUNCHER = """\
import os, signal, sys
from pathlib import Path
from megarl.launch.process import Process
process = Process("tree", sys.argv[2:], env=os.environ, log=Path(sys.argv[1]))
process.start()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run may have it ignored
signal.pause()
"""


def start(tree, mode, **env):
    log = tree.folder / "log"
    process = Process("tree", tree.argv(mode), env={**os.environ, **env}, log=log)
    process.start()
    tree.wait_ready()
    return process


def ended(process):
    until(lambda: process.poll() is not None, "the guard")
    return process.poll()


@pytest.mark.parametrize("code", [0, 3])
def test_others_end_with_the_program(make_tree, code):
    tree = make_tree()
    process = start(tree, str(code))
    assert ended(process) == code
    assert tree.alive() == []
    assert process.tail() == "all are there"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all(make_tree, number):
    tree = make_tree()
    process = start(tree, "wait")
    assert sorted(tree.alive()) == ["child", "daemon", "main", "session"]
    process._popen.send_signal(number)
    assert ended(process) == 128 + signal.SIGTERM
    assert tree.alive() == []


@pytest.mark.parametrize("role", ["main", "daemon"])
def test_what_ignores_sigterm_is_killed(make_tree, role):
    tree = make_tree()
    process = start(tree, "wait", STUBBORN=role)
    process.terminate()
    others = {"main", "child", "session", "daemon"} - {role}
    until(lambda: not others & set(tree.alive()), "those that listen")
    assert tree.alive() == [role]
    process.terminate()  # the second one kills
    assert ended(process) == 128 + (signal.SIGKILL if role == "main" else signal.SIGTERM)
    assert tree.alive() == []


def test_stop_kills_after_the_grace(make_tree):
    tree = make_tree()
    process = start(tree, "wait", STUBBORN="session")
    assert process.stop(grace_s=0.5) == 128 + signal.SIGTERM
    assert tree.alive() == []


def test_stop_all_ends_several_and_takes_those_that_never_ran(make_tree, tmp_path):
    trees = [make_tree("a"), make_tree("b")]
    processes = [start(tree, "wait") for tree in trees]
    never = Process("never", ["true"], env={}, log=None)
    stop_all([*processes, never], grace_s=30)
    assert [tree.alive() for tree in trees] == [[], []]
    stop_all(processes, grace_s=30)  # again does nothing


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_death_of_the_launcher_ends_all(make_tree, tmp_path, number):
    """A real launcher process, killed as the kernel or a user would."""
    tree = make_tree()
    argv = [sys.executable, "-c", LAUNCHER, str(tmp_path / "log"), *tree.argv("wait")]
    with subprocess.Popen(argv) as launcher:
        try:
            tree.wait_ready()
            guard = parent_of(tree.pid("main"))
            assert parent_of(guard) == launcher.pid
            launcher.send_signal(number)
            launcher.wait(60)
            tree.wait_gone()
            until(lambda: not is_alive(guard, GUARD), "the guard's end")
        finally:
            launcher.kill()


def test_the_death_of_the_guard_ends_the_program(make_tree):
    tree = make_tree()
    process = start(tree, "wait")
    os.kill(parent_of(tree.pid("main")), signal.SIGKILL)
    until(lambda: not is_alive(tree.pid("main"), str(tree.folder)), "the program's end")
    assert ended(process) == 128 + signal.SIGKILL


def test_the_program_gets_its_arguments_environment_and_plain_signals(tmp_path):
    code = (
        "import os, signal, sys; print(sys.argv[1:], os.environ['A'], "
        "signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, os.getsid(0) == os.getppid(), "
        "os.listdir('/proc/self/fd').__len__())"
    )
    argv = [sys.executable, "-S", "-c", code, "a b", "--", "$A"]
    process = Process("p", argv, env={"A": "1"}, log=tmp_path / "log")
    process.start()
    assert ended(process) == 0
    # stdin, stdout, stderr and the listing itself: neither the pipe nor the wakeup descriptor.
    assert process.tail() == "['a b', '--', '$A'] 1 True True 4"


def test_a_program_that_is_not_there(tmp_path):
    process = Process("p", ["/no/such/program"], env={}, log=tmp_path / "log")
    process.start()
    assert ended(process) == 127
    assert process.tail() == "cannot start /no/such/program: No such file or directory"


def test_tail_is_the_last_lines(tmp_path):
    log = tmp_path / "log"
    process = Process("p", ["true"], env={}, log=log)
    assert process.tail() == ""
    log.write_bytes(
        b"x" * 100_000 + b"\n" + b"\n".join(b"line %d" % i for i in range(100)) + b"\xff"
    )
    assert process.tail(2) == "line 98\nline 99\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("argv", [[], ["x", "--", "true"], ["0", "true"], ["0", "--"]])
def test_wrong_use_of_the_guard(argv):
    done = subprocess.run(
        [sys.executable, GUARD, *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.split()[0]) == (2, "usage:")


def test_a_guard_is_small(make_tree):
    """It stands beside every process of a run. Measured 10.5 MB; torch alone would be 200."""
    tree = make_tree()
    process = start(tree, "wait")
    pages = int(Path(f"/proc/{parent_of(tree.pid('main'))}/statm").read_text().split()[1])
    assert pages * resource.getpagesize() < 20e6
    process.stop(grace_s=30)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
