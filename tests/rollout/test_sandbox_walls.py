"""What a program in a PythonSandbox can reach, and what is left of what it wrote."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest
from sandboxes import IS_ROOT, LONG_S, end, nothing_left, sandbox

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    with nothing_left():
        yield


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


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Where the folders of programs are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    for parent in tmp_path.parents[:2]:  # pytest's own are closed to the program's user
        parent.chmod(0o755)
    return tmp_path


def test_a_folder_is_removed_whatever_is_in_it(isolation, temporary):
    (outside := temporary / "outside").mkdir(mode=0o755)
    (outside / "kept").touch()
    code = (
        f"import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.symlink({str(outside)!r}, 'd')\n"
        f"os.symlink({str(outside)!r}, 'a/d'); os.mkdir('a/b/e', 0); os.chmod('a/b', 0)\n"
        "os.chmod('a', 0); os.chmod('.', 0)"
    )
    assert end(sandbox(isolation), code).why == "ok"
    assert list(temporary.iterdir()) == [outside]
    assert list(outside.iterdir()) == [outside / "kept"]
    assert outside.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "code",
    [
        "import os, shutil\nshutil.rmtree(os.getcwd())",
        "import os\nfor _ in range(25):\n    os.mkdir('a' * 200); os.chdir('a' * 200)",
        "import os\nfor _ in range(3000):\n    os.mkdir('a'); os.chdir('a')",
        "import os\nfor i in range(9000):\n    open(str(i), 'w')",
    ],
    ids=["removed", "long names", "deep", "many"],
)
def test_what_a_program_does_to_its_folder_is_its_own_matter(isolation, code, temporary, capfd):
    result = end(sandbox(isolation), code + "\nprint('done')")
    if isolation == "namespaces":  # its files have a bound in number
        assert result.isolation == isolation
    else:
        assert (result.why, result.stdout) == ("ok", "done\n"), result.stderr
    assert not list(temporary.iterdir())
    assert "sandbox supervisor" not in capfd.readouterr().err


def test_a_folder_that_stays_is_told_and_the_result_stands(temporary, capfd):
    code = (
        "import os\nhere = os.getcwd()\nos.rename(here, here + 'x')\nos.mkdir(here)\n"
        "open(here + '/y', 'w')"
    )
    assert end(sandbox("process"), code).why == "ok"
    assert "is left: " in capfd.readouterr().err
    (moved,) = temporary.glob("*x")
    assert not list(moved.iterdir())


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


DEVICES = """
import multiprocessing, os
print(*sorted(os.listdir("/dev")))
print(os.stat("/dev/null").st_rdev, open("/dev/zero", "rb").read(3), len(os.urandom(4)))
print(len(open("/dev/urandom", "rb").read(3)), open("/dev/null").read(), open("/dev/stdin").read())
for path in ("/dev/null", "/dev/full", "/dev/new", "/dev/shm/new", "/run/new"):
    try:
        with open(path, "w") as file:
            file.write("x")
    except OSError as error:
        print(error.strerror)
multiprocessing.Lock()  # a semaphore in /dev/shm
print("ok")
"""
SEEN = """fd full null random shm stderr stdin stdout urandom zero
259 b'\\x00\\x00\\x00' 4
3  in
No space left on device
Read-only file system
Read-only file system
ok
"""


def test_devices_are_those_that_are_everybodys(as_user):
    result = as_user(DEVICES, "in")
    assert (result["stderr"], result["isolation"]) == ("", "namespaces")
    # /dev and /run are root's.
    assert result["stdout"].replace("Permission denied", "Read-only file system") == SEEN


@pytest.fixture(params=["root", "another user"])
def as_user(request):
    """Runs code in namespaces, as root and as a user without rights: its result as a dict."""
    if request.param == "root" and not IS_ROOT:
        pytest.skip("only root can be root")

    def run(code, stdin="", isolation="namespaces", **variables):
        script = (
            "import asyncio, dataclasses, json, sys\nsys.path.append(sys.argv[1])\n"
            "from megarl.rollout.sandbox import *\ncode, stdin = json.load(sys.stdin)\n"
            f"box = PythonSandbox(Limits(wall_s={LONG_S}), isolation=({isolation!r},))\n"
            "try: result = dataclasses.asdict(asyncio.run(box.run(code, stdin)))\n"
            "except SandboxFailed as error: result = {'refused': str(error)}\n"
            "print(json.dumps(result))"
        )
        nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        done = subprocess.run(
            ["/usr/bin/python3", "-c", script, str(ROOT)],
            input=json.dumps([code, stdin]),
            env={**os.environ, "HOME": "/", **variables},
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=True,
            cwd="/",
            **(nobody if request.param == "another user" and IS_ROOT else {}),
        )
        result = json.loads(done.stdout)
        if "refused" in result:
            pytest.skip(f"this machine does not permit it: {result['refused']}")
        return result

    return run


def test_a_user_without_rights_removes_what_is_closed_to_him(as_user, temporary):
    code = (
        "import os\nos.makedirs('a/b/c'); open('a/b/d', 'w'); os.chmod('a/b/c', 0)\n"
        "os.chmod('a/b', 0); os.chmod('a', 0)"
    )
    result = as_user(code, isolation="process", TMPDIR=str(temporary))
    assert (result["why"], result["stderr"]) == ("ok", "")
    assert not list(temporary.iterdir())


CONNECT = """
import socket
for path in {paths}:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("connected to", path)
    except OSError as error:
        print(error.strerror)
"""


def test_sockets_of_the_caller_and_the_machine_are_out_of_reach(as_user):
    """In folders that everybody may use, and in those that the caller has named."""
    with contextlib.ExitStack() as stack:
        places = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            for folder in ("/tmp", "/var/tmp", "/run" if IS_ROOT else "/tmp", *2 * [ROOT.parent])
        ]
        for place in places:
            place.chmod(0o755)
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(place / "s"))
            (place / "s").chmod(0o777)
            server.listen()
        tmp, runtime = places[-2:]
        code = CONNECT.format(paths=[str(place / "s") for place in places])
        result = as_user(code, TMPDIR=str(tmp), XDG_RUNTIME_DIR=str(runtime))
    assert result["stdout"].splitlines() == ["No such file or directory"] * len(places)


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
