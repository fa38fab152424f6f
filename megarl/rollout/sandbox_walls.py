"""What the kernel is asked for to keep a program in, for megarl/rollout/sandbox_supervisor.py.

Imports the standard library only, and little of it: each run of a program waits for it.
"""

import contextlib
import ctypes
import os
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER = 0x10000000
_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mount uts ipc pid net
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_FIRST_UID = 1_000_000_000  # of the users that programs run as: nobody's on a plain machine
_SCRATCH, _DEV, _SHM = "/tmp", "/dev", "/dev/shm"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
_AT_ONCE = 4096  # entries of a folder that are read before some are removed


class SetupError(Exception):
    """The kernel, or who started this machine, does not permit a wall."""


def prctl(option: int, value: int) -> None:
    _check(_LIBC.prctl(option, value, 0, 0, 0), f"prctl {option}")


def kernel() -> tuple[int, ...]:
    return tuple(int(x) for x in os.uname().release.split(".")[:2])


def free_uid() -> int:
    """A user that no other run has now: a process id of this machine is unique."""
    with open("/proc/self/uid_map") as file:
        first, _, count = (int(x) for x in file.readline().split())
    if first + count > _FIRST_UID + (1 << 22):
        return _FIRST_UID + os.getpid()
    low = first + count // 2  # a container's map is small: the upper half of it
    return low + os.getpid() % (count - count // 2)


# ---------------------------------------------------------------- namespaces


def unshare() -> None:
    """Of this process and, of processes, its children."""
    uid, gid = os.getuid(), os.getgid()
    is_root = uid == 0
    _check(_LIBC.unshare(_NAMESPACES | (0 if is_root else _CLONE_NEWUSER)), "unshare")
    if not is_root:
        ids = {"uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in {"setgroups": "deny", **ids}.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def mount_walls(*, python: str, hidden: list[str], scratch_bytes: int, is_other_user: bool) -> str:
    """A fresh /tmp and /dev/shm, the rest read-only; no devices but those that are everybody's,
    none of the folders in `hidden`, no processes. The program's own folder.

    Args:
      python: its folder stays, also where it is below one that is hidden.
      is_other_user: the program may not pass folders that are closed to others: those on the
        way to `python` are made anew.
    """
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    scratch, needed = os.path.realpath(_SCRATCH), _prefixes(python)
    covered = {os.path.realpath(folder) for folder in (_DEV, *hidden)} - {"/"}
    if is_other_user:
        covered |= {folder for path in needed if (folder := _closed_folder(path))}
    covered = {folder for folder in covered if not _is_in(folder, scratch)}
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    arguments = (_AT_FDCWD, b"/", _AT_RECURSIVE, read_only, ctypes.sizeof(read_only))
    _check(_LIBC.syscall(_SYS_MOUNT_SETATTR, *arguments), "read-only files")
    kept = {path: os.open(path, os.O_PATH) for path in needed}
    devices = {name: os.open(f"{_DEV}/{name}", os.O_PATH) for name in _DEVICES}
    # A folder before those below it, which are then no longer there.
    mounted = [folder for folder in sorted(covered) if _cover(folder, 1 << 20, 0o755)]
    os.makedirs(scratch, exist_ok=True)
    _cover(scratch, scratch_bytes, 0o1777)
    for path, fd in kept.items():
        if any(_is_in(path, folder) for folder in (*mounted, scratch)):
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", path, "", _MS_BIND | _MS_REC)
        os.close(fd)
    _fill_dev(devices)
    for folder in filter(lambda folder: folder not in kept, mounted):
        _mount("none", folder, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    try:
        _mount("proc", "/proc", "proc", flags)
    except SetupError:  # a container whose own is covered in part: then there is none
        _mount("tmpfs", "/proc", "tmpfs", flags, "size=4k,mode=755")
    own = os.path.join(scratch, "run")
    os.mkdir(own, 0o755)
    return own


def _is_in(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _cover(folder: str, size: int, mode: int) -> bool:
    """Whether there was a folder, which is now an empty one in memory."""
    if not os.path.isdir(folder):
        return False
    options = f"size={size},nr_inodes=4096,mode={mode:o}"
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    return True


def _fill_dev(devices: dict[str, int]) -> None:
    """What a program needs of /dev, which is empty. No terminals, no disks."""
    for name, fd in devices.items():
        os.close(os.open(f"{_DEV}/{name}", os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(f"/proc/self/fd/{fd}", f"{_DEV}/{name}", "", _MS_BIND)
        os.close(fd)
    for name, place in _LINKS.items():
        os.symlink(f"/proc/self/fd{place}", f"{_DEV}/{name}")
    os.mkdir(_SHM)
    _cover(_SHM, 1 << 20, 0o1777)


def _prefixes(python: str) -> list[str]:
    """The folders of an interpreter: that of its environment, and that of what it links to."""
    return [os.path.dirname(os.path.dirname(p)) for p in (python, os.path.realpath(python))]


def _closed_folder(path: str) -> str | None:
    """The first folder on the way to `path` that other users may not pass."""
    closed = None
    while path != "/":
        closed = closed if os.stat(path).st_mode & 0o001 else path
        path = os.path.dirname(path)
    return closed


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind, options)]
    _check(_LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _check(answer: int, what: str) -> None:
    if answer != 0:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")


# ---------------------------------------------------------------- what a program left


def empty_folder(folder: int, limit_s: float) -> OSError | None:
    """Remove what is in an open folder, however deep it is and closed to this user.

    No path is followed, so nobody can lead this out of the folder. What is in a folder below is
    moved up before that folder goes: two descriptors are enough for any depth.

    Returns:
      Why something is left; None if nothing is.
    """
    prefix, moved, deadline = os.urandom(8).hex(), 0, time.monotonic() + limit_s
    while entries := _some(folder):
        removed, failed = 0, None
        for entry in entries:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                else:
                    moved = _lift(entry.name, folder, prefix, moved)
                    os.rmdir(entry.name, dir_fd=folder)
                removed += 1
            except OSError as error:
                failed = error
            if time.monotonic() > deadline:
                return TimeoutError(f"not empty after {limit_s:g} s")
        if not removed:
            return failed
    return None


def _lift(name: str, folder: int, prefix: str, moved: int) -> int:
    """Move what is in a folder's folder `name` into it, as `prefix-moved` and so on."""
    below = _open_anyway(name, folder)
    try:
        while entries := _some(below):
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    os.close(_open_anyway(entry.name, below))  # to be moved it must be writable
                    new = f"{prefix}-{moved}"
                    os.rename(entry.name, new, src_dir_fd=below, dst_dir_fd=folder)
                    moved += 1
                else:
                    os.unlink(entry.name, dir_fd=below)
    finally:
        os.close(below)
    return moved


def _open_anyway(name: str, folder: int) -> int:
    """A folder's folder, open; no symbolic link, and not by its mode closed to its owner."""
    place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
    try:
        path = f"/proc/self/fd/{place}"
        with contextlib.suppress(PermissionError):  # root may open another user's folder as it is
            os.chmod(path, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(place)


def _some(folder: int) -> list["os.DirEntry[str]"]:
    os.lseek(folder, 0, os.SEEK_SET)  # a copy of the descriptor shares its place
    with os.scandir(folder) as entries:
        return [entry for entry, _ in zip(entries, range(_AT_ONCE), strict=False)]
