"""PythonSandbox against programs that fight it: each ends, and nothing of it is left.

What they may reach is in test_sandbox_walls.py. Programs that multiply do so 2**8 times at most.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from typing import get_args

import psutil
import pytest
from sandboxes import (
    IS_ROOT,
    LONG_S,
    PYTHONS,
    children,
    end,
    nothing_left,
    others,
    run,
    sandbox,
)

from megarl.rollout import sandbox as module
from megarl.rollout import sandbox_supervisor
from megarl.rollout.sandbox import Isolation, Limits, PythonSandbox, SandboxFailed


@pytest.fixture(autouse=True)
def _nothing_is_left():
    with nothing_left():
        yield


# ---------------------------------------------------------------- well-behaved programs


def test_a_program_reads_stdin_and_writes_both_outputs(isolation):
    code = "import sys\nprint(sys.stdin.read()[::-1])\nprint('é', file=sys.stderr)\nsys.exit(3)"
    stdin = "ab\n" * 1_000_000 + "☃"  # more than pipes hold
    result = end(sandbox(isolation, output_bytes=8 << 20), code, stdin)
    assert result.stdout == stdin[::-1] + "\n"
    assert (result.stderr, result.exit_code, result.why) == ("é\n", 3, "error")
    assert result.isolation == isolation


def test_reasons_are_told_apart(isolation):
    box = sandbox(isolation, memory_bytes=256 << 20)
    ends = {
        "pass": ("ok", 0),
        "1 / 0": ("error", 1),
        "import os; os.abort()": ("crash", -signal.SIGABRT),
        "x = bytearray(8 << 30)": ("memory", 1),
        "x = []\nwhile True: x.append(bytearray(1 << 20))": ("memory", 1),
    }
    for code, expected in ends.items():
        result = end(box, code)
        assert (result.why, result.exit_code) == expected, code
    assert "ZeroDivisionError" in end(box, "1 / 0").stderr


def test_what_the_trainer_can_import_a_program_can():
    box = PythonSandbox(Limits(wall_s=LONG_S, cpu_s=LONG_S), isolation=get_args(Isolation))
    code = "import numpy, sympy\nprint(numpy.eye(3).trace(), sympy.sqrt(8))"
    assert end(box, code).stdout == "3.0 2*sqrt(2)\n"


def test_a_program_has_no_descriptor_but_three(isolation):
    with open("/dev/null") as file:
        os.set_inheritable(file.fileno(), True)
        result = end(sandbox(isolation), "import os\nprint(sorted(os.listdir('/proc/self/fd')))")
    assert result.stdout == "['0', '1', '2', '3']\n"  # 3 is that of the listing


def test_at_most_so_many_run_at_one_time():
    box = PythonSandbox(Limits(wall_s=LONG_S), max_concurrent=2, isolation=get_args(Isolation))
    assert end(box, "print(0)").stdout == "0\n"
    most = 0

    async def main():
        nonlocal most
        runs = [asyncio.create_task(box.run("print(1)")) for _ in range(7)]
        while not all(task.done() for task in runs):
            direct = psutil.Process().children()
            most = max(most, sum(child not in others for child in direct))
            await asyncio.sleep(0.001)
        return [task.result().stdout for task in runs]

    assert asyncio.run(main()) == ["1\n"] * 7
    assert most == 2
    assert end(box, "print(2)").stdout == "2\n"  # in another event loop


# ---------------------------------------------------------------- programs that do not end


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(600)",
        "import signal, time\n"
        "for s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["loop", "closes its outputs", "ignores signals", "stops itself"],
)
def test_what_does_not_end_is_ended_and_the_loop_goes_on(isolation, code):
    result, ticks, _ = run(sandbox(isolation, wall_s=1.5, cpu_s=100), code)
    assert (result.why, result.exit_code) == ("timeout", None)
    assert ticks >= 5


def test_cpu_time_is_limited_too_and_what_was_written_is_kept(isolation):
    result = end(sandbox(isolation, cpu_s=1), "print('first', flush=True)\nwhile True: pass")
    assert (result.why, result.exit_code) == ("timeout", -signal.SIGXCPU)
    assert result.stdout == "first\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_gigabyte_of_output_is_cut(isolation, stream):
    code = f"import sys\nfor _ in range(1024): sys.{stream}.write('x' * (1 << 20))"
    result = end(sandbox(isolation, output_bytes=1000), code)
    assert (result.why, result.exit_code) == ("output", None)
    assert getattr(result, stream) == "x" * 1000


# ---------------------------------------------------------------- programs that multiply

BOMB = """
import os, time
for _ in range(8):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(600)
"""


def test_a_fork_bomb_stays_small_and_ends(isolation):
    result, _, most = run(sandbox(isolation, processes=16, wall_s=10.0), BOMB)
    if isolation == "process" and IS_ROOT:  # the kernel does not limit root: it is counted
        assert result.why == "processes"
    else:
        assert result.why == "timeout"
        assert 8 < most <= 16 + 8  # the supervisor, init, and what is just being refused


def test_threads_count_as_processes(wall):
    code = (
        "import threading, time\n"
        "for i in range(100):\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    box = sandbox(wall, processes=16, memory_bytes=1 << 40)  # stacks are not what they lack
    result = end(box, code)
    assert result.why == "error"
    assert "can't start new thread" in result.stderr


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


def test_a_daemon_ends_with_its_program(isolation):
    assert end(sandbox(isolation), DAEMON).why == "ok"


def test_children_that_hold_the_output_do_not_hold_the_run(isolation):
    code = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint('done')"
    result = end(sandbox(isolation), code)
    assert (result.why, result.stdout) == ("ok", "done\n")


# ---------------------------------------------------------------- callers that go


def test_a_cancelled_run_leaves_nothing(isolation, caplog):
    box = sandbox(isolation)
    code = "import os, time\nos.fork()\ntime.sleep(600)"

    async def main():
        task = asyncio.create_task(box.run(code))
        async with asyncio.timeout(LONG_S):
            # The supervisor, init and the program's two.
            while len(children()) < 4:  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(LONG_S):
                await task

    asyncio.run(main())
    assert not caplog.records  # such as that a supervisor had to be killed


FEW = "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(600)"


def test_a_caller_that_is_killed_takes_its_programs_along(isolation):
    sandbox(isolation)
    python = PYTHONS.get(isolation, sys.executable)
    script = (
        "import asyncio\nfrom megarl.rollout.sandbox import *\n"
        f"box = PythonSandbox(Limits(wall_s=600), isolation=({isolation!r},), python={python!r})\n"
        f"asyncio.run(box.run({FEW!r}))"
    )
    caller = subprocess.Popen([sys.executable, "-c", script])

    async def until(condition):
        async with asyncio.timeout(LONG_S):
            while not condition():  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.01)

    def programs():
        """Those that are ours now are zombies until they are waited for."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return children()

    asyncio.run(until(lambda: len(children()) > 5))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    asyncio.run(until(lambda: not programs()))


# ---------------------------------------------------------------- machines that refuse


def test_an_isolation_that_is_refused_is_told_and_the_next_is_used(tmp_path, caplog):
    tmp_path.chmod(0o700)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    options = {"limits": Limits(wall_s=LONG_S), "python": str(python)}
    box = PythonSandbox(isolation=("uid", "process"), **options)
    with caplog.at_level(logging.WARNING):
        assert [end(box, "print(1)").isolation for _ in range(2)] == ["process"] * 2
    (record,) = caplog.records
    assert "no isolation by uid here" in record.getMessage()
    with pytest.raises(SandboxFailed, match="isolation uid"):
        end(PythonSandbox(isolation=("uid",), **options), "print(1)")


def test_an_isolation_that_has_worked_is_not_left(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    box = PythonSandbox(
        Limits(wall_s=LONG_S), isolation=("process", "namespaces"), python=str(python)
    )
    assert end(box, "print(1)").stdout == "1\n"
    python.unlink()
    with pytest.raises(SandboxFailed, match=r"isolation process: the program's start"):
        end(box, "print(1)")


@pytest.fixture
def runs(monkeypatch):
    """What was run by which isolation, on a machine that refuses namespaces and other users."""
    seen, supervise = [], module._supervise

    async def recorded(code, stdin, python, isolation, limits):
        seen.append((code, isolation))
        if isolation != "process":
            return {"setup": "not here"}
        return await supervise(code, stdin, python, isolation, limits)

    monkeypatch.setattr(module, "_supervise", recorded)
    monkeypatch.setattr(module, "_found", {})
    return seen


def test_a_program_is_run_once_by_what_a_harmless_one_has_found_for_all_sandboxes(runs):
    named = get_args(Isolation)

    async def both():
        box = PythonSandbox(Limits(wall_s=LONG_S), isolation=named, max_concurrent=2)
        return await asyncio.gather(box.run("print(1)"), box.run("print(2)"))

    assert [result.stdout for result in asyncio.run(both())] == ["1\n", "2\n"]
    assert end(PythonSandbox(Limits(wall_s=99), isolation=named), "print(3)").stdout == "3\n"
    assert runs[:3] == [("pass", "namespaces"), ("pass", "uid"), ("pass", "process")]
    assert sorted(runs[3:]) == [(f"print({i})", "process") for i in (1, 2, 3)]


def test_no_program_is_root_unless_that_is_asked_for(runs, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(SandboxFailed, match=r"uid: not here.*start the run as a user without"):
        asyncio.run(PythonSandbox().run("print(1)"))
    assert runs == [("pass", "namespaces"), ("pass", "uid")]
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    result = asyncio.run(PythonSandbox(Limits(wall_s=LONG_S)).run("print(1)"))
    assert (result.stdout, result.isolation) == ("1\n", "process")


def test_an_interpreter_that_does_not_start_is_a_refusal(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no library >&2\nexit 1\n")
    python.chmod(0o755)
    box = PythonSandbox(isolation=("process",), python=str(python))
    with pytest.raises(SandboxFailed, match="python does not start: no library"):
        end(box, "print(1)")


def test_a_full_disk_is_told_and_nothing_is_run(monkeypatch, tmp_path):
    box = sandbox("process")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(SandboxFailed, match=r"isolation process: .*No such file"):
        end(box, "print(1)")


def test_an_error_behind_the_start_is_no_refusal(monkeypatch):
    for name in ("__init__", "prepare", "result", "clean_up"):
        monkeypatch.setattr(sandbox_supervisor.Run, name, lambda *args: None)
    cleaned = []
    monkeypatch.setattr(sandbox_supervisor.Run, "clean_up", lambda run: cleaned.append(run))

    def fail(run):
        raise OSError("no such luck")

    monkeypatch.setattr(sandbox_supervisor.Run, "result", fail)
    with pytest.raises(OSError, match="no such luck"):
        sandbox_supervisor._answer({}, 0)
    monkeypatch.setattr(sandbox_supervisor.Run, "prepare", fail)
    assert sandbox_supervisor._answer({}, 0) == {"setup": "no such luck"}
    assert len(cleaned) == 2


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="wall_s must be above 0, got 0"):
        Limits(wall_s=0)
    with pytest.raises(ValueError, match="isolation: expected some of"):
        PythonSandbox(isolation=("chroot",))
