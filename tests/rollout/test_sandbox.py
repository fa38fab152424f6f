"""PythonSandbox against programs that fight it: each ends, and nothing of it is left.

The test's own process is made the parent of whatever a supervisor would leave behind, so what
is left is seen as its child. Programs that multiply do so 2**8 times at most.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from megarl.rollout.sandbox import Limits, PythonSandbox, SandboxFailed

_PR_SET_CHILD_SUBREAPER = 36
PYTHONS = {"uid": "/usr/bin/python3"}
IS_ROOT = os.getuid() == 0
LONG_S = 120.0


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Orphans become ours; after a test there are none."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    global others
    before = others = set(all_children())
    yield
    left = [child for child in children() if child not in before]
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert not left


def all_children():
    return psutil.Process().children(recursive=True)


others: set[psutil.Process] = set()
"""Servers of the test session and what else was there when the test began."""


def children():
    return [child for child in all_children() if child not in others]


def sandbox(isolation, **limits):
    """One that has no other isolation; the test is skipped where the machine refuses it."""
    # Ours may be in a home folder, where another user cannot go.
    options = {"isolation": (isolation,), "python": PYTHONS.get(isolation, sys.executable)}
    if refusal := refusal_of(**options):
        pytest.skip(f"this machine does not permit it: {refusal}")
    return PythonSandbox(Limits(**{"wall_s": LONG_S, **limits}), **options)


@functools.cache
def refusal_of(isolation, python):
    """None if it works here."""
    box = PythonSandbox(Limits(wall_s=LONG_S), isolation=isolation, python=python)
    try:
        assert asyncio.run(box.run("print(6 * 7)")).stdout == "42\n"
    except SandboxFailed as error:
        return str(error)
    return None


@pytest.fixture(params=["namespaces", "uid", "process"])
def isolation(request):
    return request.param


@pytest.fixture(params=["namespaces", "uid"])
def wall(request):
    """Isolations that keep a hostile program in."""
    return request.param


def run(box, code, stdin=""):
    """The result, the ticks of the loop meanwhile, and the most processes at a tick."""
    ticks, most = 0, 0

    async def tick():
        nonlocal ticks, most
        while True:
            await asyncio.sleep(0.01)
            ticks += 1
            most = max(most, len(children()))

    async def main():
        ticker = asyncio.create_task(tick())
        try:
            async with asyncio.timeout(2 * LONG_S):
                return await box.run(code, stdin)
        finally:
            ticker.cancel()

    return asyncio.run(main()), ticks, most


def end(box, code, stdin=""):
    return run(box, code, stdin)[0]


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
    box = PythonSandbox(Limits(wall_s=LONG_S, cpu_s=LONG_S))
    code = "import numpy, sympy\nprint(numpy.eye(3).trace(), sympy.sqrt(8))"
    assert end(box, code).stdout == "3.0 2*sqrt(2)\n"


def test_a_program_has_no_descriptor_but_three(isolation):
    with open("/dev/null") as file:
        os.set_inheritable(file.fileno(), True)
        result = end(sandbox(isolation), "import os\nprint(sorted(os.listdir('/proc/self/fd')))")
    assert result.stdout == "['0', '1', '2', '3']\n"  # 3 is that of the listing


def test_at_most_so_many_run_at_one_time():
    box = PythonSandbox(Limits(wall_s=LONG_S), max_concurrent=2)
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


# ---------------------------------------------------------------- programs that reach out


def test_files_are_bounded(isolation):
    code = "with open('big', 'wb') as f:\n    for _ in range(1024): f.write(bytes(1 << 20))"
    result = end(sandbox(isolation, file_bytes=8 << 20), code)
    assert result.why == "error"
    assert "OSError" in result.stderr


def test_many_files_are_bounded_together():
    code = "for i in range(64):\n    open(str(i), 'wb').write(bytes(1 << 20))"
    result = end(sandbox("namespaces", file_bytes=8 << 20), code)
    assert "No space left" in result.stderr


def test_a_folder_is_removed_whatever_is_in_it(isolation, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:  # pytest's own are closed to the program's user
        parent.chmod(0o755)
    (outside := tmp_path / "outside").mkdir(mode=0o755)
    code = (
        f"import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.symlink({str(outside)!r}, 'd')\n"
        "os.chmod('a/b', 0); os.chmod('a', 0)"
    )
    assert end(sandbox(isolation), code).why == "ok"
    assert list(tmp_path.iterdir()) == [outside]
    assert outside.stat().st_mode & 0o777 == 0o755


def test_nothing_is_written_outside():
    name = f"/var/tmp/{uuid.uuid4()}"
    code = f"""
for path in ({name!r}, "/tmp/{Path(name).name}", "/dev/shm/{Path(name).name}"):
    try:
        open(path, "w")
    except OSError as error:
        print(error.strerror)
"""
    result = end(sandbox("namespaces"), code)
    assert result.stdout == "Read-only file system\n"  # the other two are its own
    for folder in ("/var/tmp", "/tmp", "/dev/shm"):
        assert not Path(folder, Path(name).name).exists()


@contextlib.contextmanager
def trainer():
    """A process with a key in its environment."""
    process = subprocess.Popen(["sleep", "600"], env={"API_KEY": "s3cret"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


SPY = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/*/environ"):
    try:
        print(open(path).read())
    except OSError:
        pass
for pid in {pids}:
    try:
        os.kill(pid, 9)
    except OSError as error:
        print(type(error).__name__)
"""


def test_keys_and_processes_of_others_are_out_of_reach(wall, monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    box = sandbox(wall)
    with trainer() as process:
        result = end(box, SPY.format(pids=[process.pid, os.getpid()]))
        assert process.poll() is None
    assert "s3cret" not in result.stdout
    assert "PYTHONHASHSEED" in result.stdout
    refused = {"namespaces": "ProcessLookupError", "uid": "PermissionError"}[wall]
    assert result.stdout.splitlines()[-2:] == [refused] * 2


def test_the_environment_is_built_anew(monkeypatch):
    monkeypatch.setenv("API_KEY", "s3cret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    result = end(sandbox("process"), "import os, sys\nprint(dict(os.environ), sys.path)")
    assert "s3cret" not in result.stdout
    assert "/somewhere" not in result.stdout


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection({server.getsockname()}, 5)"
        result = end(sandbox("namespaces"), code)
    assert result.why == "error"
    assert "Network is unreachable" in result.stderr


def test_no_home_and_no_sockets_of_the_machine():
    code = "import os\nprint(os.listdir('/run'), os.path.exists('/usr/bin'))"
    home = os.path.expanduser("~")
    assert end(sandbox("namespaces"), code).stdout == "[] True\n"
    if not os.access(home, os.W_OK):
        pytest.skip(f"cannot write into {home}")
    secret = Path(home, f".{uuid.uuid4()}")
    secret.write_text("s3cret")
    try:
        result = end(sandbox("namespaces"), f"print(open({str(secret)!r}).read())")
    finally:
        secret.unlink()
    assert "s3cret" not in result.stdout


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


def test_a_caller_that_is_killed_takes_its_programs_along(isolation):
    sandbox(isolation)
    python = PYTHONS.get(isolation, sys.executable)
    script = (
        "import asyncio\nfrom megarl.rollout.sandbox import *\n"
        f"box = PythonSandbox(Limits(wall_s=600), isolation=({isolation!r},), python={python!r})\n"
        f"asyncio.run(box.run({BOMB!r}))"
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


def test_an_isolation_that_has_worked_is_not_left(monkeypatch):
    box = PythonSandbox(Limits(wall_s=LONG_S), isolation=("process", "namespaces"))
    assert end(box, "print(1)").stdout == "1\n"
    monkeypatch.setattr(box, "python", "/no/such/python")
    with pytest.raises(SandboxFailed, match=r"isolation process: the program's start"):
        end(box, "print(1)")


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="wall_s must be above 0, got 0"):
        Limits(wall_s=0)
    with pytest.raises(ValueError, match="isolation: expected some of"):
        PythonSandbox(isolation=("chroot",))
