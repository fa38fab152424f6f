"""A whole run of stand-in processes under a real launcher process, to each of its ends."""

import contextlib
import json
import signal
import subprocess
import sys

import pytest
from process_trees import until

from megarl.launch.placement import free_ports

LAUNCHER = """\
import json, os, signal, sys
from pathlib import Path
from megarl.launch.process import Process
from megarl.launch.servers import Servers
from megarl.launch.supervise import supervise

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run may have it ignored
folder, servers, ranks, limits = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
restarts = {"restarts": limits.pop("restarts", 0)}
if restarts["restarts"]:
    restarts["requests"] = folder / "requests"

def process(name, argv):
    log = None if name == "rank 0" else folder / f"{name}.log"
    port, argv = (argv[0], argv[1:]) if isinstance(argv[0], int) else (None, argv)
    return Process(name, argv, env=os.environ, log=log, port=port)

sys.exit(supervise(
    Servers([process(f"server {i}", argv) for i, argv in enumerate(servers)], **restarts),
    [process(f"rank {i}", argv) for i, argv in enumerate(ranks)],
    **limits,
))
"""


def script(code):
    return [sys.executable, "-S", "-c", code]


@contextlib.contextmanager
def launch(folder, servers, ranks, *prefix, **limits):
    """A launcher; a test that fails inside kills it, and with it all that it started."""
    run = [json.dumps(part) for part in (servers, ranks, limits)]
    argv = [sys.executable, "-c", LAUNCHER, str(folder), *run]
    with subprocess.Popen(
        [*prefix, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def after(tree, code):
    """A program that does `code` once `tree` is complete."""
    ready = str(tree.folder / "ready")
    wait = f"import os, sys, time\nwhile not os.path.exists({ready!r}): time.sleep(0.01)\n"
    return script(wait + code)


def test_success_stops_the_servers(make_tree, tmp_path):
    server = make_tree("s")
    ranks = [after(server, f"print('rank {i} here')") for i in range(2)]
    with launch(tmp_path, [server.argv("wait")], ranks) as launcher:
        out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out, err) == (0, "rank 0 here\n", "")
    assert (tmp_path / "rank 1.log").read_text() == "rank 1 here\n"
    assert server.alive() == []


def test_a_failed_rank_stops_all_and_is_shown(make_tree, tmp_path):
    server, rank = make_tree("s"), make_tree("r")
    code = "print(*range(100), sep='\\n')\nraise SystemExit(7)"
    with launch(tmp_path, [server.argv("wait")], [rank.argv("wait"), after(rank, code)]) as it:
        _, err = it.communicate(timeout=60)
    assert it.returncode == 7
    first, *tail = err.splitlines()
    assert first == f"megarl: rank 1 ended with exit code 7; the end of {tmp_path / 'rank 1.log'}:"
    assert tail == [f"  {i}" for i in range(80, 100)]
    assert server.alive() == rank.alive() == []


def test_rank_0_failed_on_the_terminal(tmp_path):
    with launch(tmp_path, [], [script("raise SystemExit('reason')")]) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert err == "reason\nmegarl: rank 0 ended with exit code 1\n"


@pytest.mark.parametrize(("code", "returned"), [(0, 1), (5, 5)])
def test_a_server_must_not_end_first(make_tree, tmp_path, code, returned):
    server, rank = make_tree("s"), make_tree("r")
    with launch(tmp_path, [server.argv(str(code))], [rank.argv("wait")]) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == returned
    assert f"server 0 ended with exit code {code} before it was up; the end of" in err
    assert err.endswith("\n  all are there\n")
    assert server.alive() == rank.alive() == []


SERVER = """
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", {port}))
listener.accept()  # the launcher, which looks whether it is up
open({up!r}, "w").close()
while not os.path.exists({end!r}): time.sleep(0.01)
sys.exit(3)
"""
WAIT = "import time\nwhile True: time.sleep(1)"
RANK = """
import os, socket, time
for up, end, port in {servers}:
    while not os.path.exists(up): time.sleep(0.01)
for up, end, port in {servers}:
    open(end, "w").close()
    while not socket.socket().connect_ex(("127.0.0.1", port)): time.sleep(0.01)
    print("one less", flush=True)
while True: time.sleep(1)
"""


def test_a_run_goes_on_without_a_server_that_was_up(tmp_path):
    """And ends with the last one."""
    places = [
        (str(tmp_path / f"up {i}"), str(tmp_path / f"end {i}"), port)
        for i, port in enumerate(free_ports(2))
    ]
    servers = [
        [port, *script(SERVER.format(port=port, up=up, end=end))] for up, end, port in places
    ]
    with launch(tmp_path, servers, [script(RANK.format(servers=places))]) as launcher:
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 3
    assert out.startswith("one less\n")
    for i in range(2):
        assert f"server {i} ended with exit code 3 before the trainer was done" in err


MORTAL_SERVER = """
import os, socket, sys, time
with open({lives!r}, "a") as file: file.write("x")
listener = socket.create_server(("127.0.0.1", {port}))
if os.path.getsize({lives!r}) == 1: listener.accept()  # the launcher, which looks once
while os.path.getsize({lives!r}) > {deaths}: time.sleep(0.01)
sys.exit(3)
"""
WAIT_FOR_LIVES = """
import os, sys, time
while not os.path.exists({lives!r}) or os.path.getsize({lives!r}) < {count}: time.sleep(0.01)
"""


def test_a_server_that_dies_is_started_again(tmp_path):
    lives, (port,) = str(tmp_path / "lives"), free_ports(1)
    server = [port, *script(MORTAL_SERVER.format(lives=lives, port=port, deaths=3))]
    rank = script(WAIT_FOR_LIVES.format(lives=lives, count=4) + "print('there')")
    with launch(tmp_path, [server], [rank], restarts=3) as launcher:
        out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out) == (0, "there\n"), err
    told = "exit code 3 before the trainer was done; it is started again in "
    delays = [part.partition(" s")[0] for part in err.split(told)[1:]]
    assert delays == ["1", "1", "2"], "later each time that it did not come up"


def test_a_server_that_keeps_dying_ends_the_run(tmp_path):
    lives, (port,) = str(tmp_path / "lives"), free_ports(1)
    server = [port, *script(MORTAL_SERVER.format(lives=lives, port=port, deaths=99))]
    with launch(tmp_path, [server], [script(WAIT)], restarts=1) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 3
    assert (tmp_path / "lives").read_text() == "xx"
    assert "0 of 1 servers are left" in err


def test_a_sick_server_is_started_again_when_the_trainer_asks(tmp_path):
    lives, (port,) = str(tmp_path / "lives"), free_ports(1)
    server = [port, *script(MORTAL_SERVER.format(lives=lives, port=port, deaths=0))]
    ask = f"open({str(tmp_path / 'requests' / str(port))!r}, 'w').close()"
    # Its life in the log begins when it listens, which the launcher sees within a second.
    rank = script(
        WAIT_FOR_LIVES.format(lives=lives, count=1)
        + f"import socket\nwhile socket.socket().connect_ex(('127.0.0.1', {port})): pass\n"
        + ask
        + WAIT_FOR_LIVES.format(lives=lives, count=2)
    )
    with launch(tmp_path, [server], [rank], restarts=1) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert "server 0 ended with exit code" in err
    assert "it is started again in 1 s" in err


REPLACED_SERVER = """
import os, socket, sys, time
with open({lives!r}, "a") as file: file.write("x")
is_second = os.path.getsize({lives!r}) == 2
if is_second:
    open({ask!r}, "w").close()  # as a trainer that has just noticed the end of the first
    while os.path.exists({ask!r}): time.sleep(0.01)
listener = socket.create_server(("127.0.0.1", {port}))
if not is_second:
    listener.accept()  # the launcher, which looks once
    sys.exit(3)
time.sleep(3)  # some looks of the launcher's
open({done!r}, "w").close()
while True: time.sleep(1)
"""


def test_a_server_that_has_just_been_replaced_is_not_started_again(tmp_path):
    """The trainer's request was about the one before."""
    names = {"lives": "lives", "done": "done"}
    paths = {key: str(tmp_path / name) for key, name in names.items()}
    (port,) = free_ports(1)
    ask = str(tmp_path / "requests" / str(port))
    server = [port, *script(REPLACED_SERVER.format(port=port, ask=ask, **paths))]
    rank = script(f"import os, time\nwhile not os.path.exists({paths['done']!r}): time.sleep(0.01)")
    with launch(tmp_path, [server], [rank], restarts=9) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert (tmp_path / "lives").read_text() == "xx"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_a_signal_to_the_launcher_ends_all(make_tree, tmp_path, number, code):
    server, rank = make_tree("s"), make_tree("r")
    with launch(tmp_path, [server.argv("wait")], [rank.argv("wait")]) as launcher:
        server.wait_ready()
        rank.wait_ready()
        launcher.send_signal(number)
        launcher.wait(120)
        server.wait_gone()
        rank.wait_gone()
        err = launcher.stderr.read()
    assert launcher.returncode == code
    assert err == ("" if number == signal.SIGKILL else f"megarl: {number.name}, stopping\n")


def test_a_rank_that_does_not_end_is_named(make_tree, tmp_path):
    rank = make_tree("r")
    with launch(tmp_path, [], [after(rank, ""), rank.argv("wait")], straggler_s=0.5) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert err == "megarl: rank 1 still running 0.5 s after another rank ended\n"
    assert rank.alive() == []


def test_a_program_that_is_not_there(make_tree, tmp_path):
    rank = make_tree("r")
    with launch(tmp_path, [["/no/such/server"]], [rank.argv("wait")]) as launcher:
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 127
    assert "cannot start /no/such/server: No such file or directory" in err
    rank.wait_gone()


def test_nohup_is_respected(make_tree, tmp_path):
    """A launcher that was started with SIGHUP ignored goes on when its terminal closes."""
    rank = make_tree("r")
    with launch(tmp_path, [], [rank.argv("wait")], "nohup") as launcher:
        rank.wait_ready()
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGTERM)
        until(lambda: launcher.poll() is not None, "the launcher")
        assert "SIGHUP" not in launcher.stderr.read()
    assert launcher.returncode == 143
    assert rank.alive() == []
