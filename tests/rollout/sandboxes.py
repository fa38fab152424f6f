"""Sandboxes for their tests, and what the test's process has started.

The test's own process is made the parent of whatever a supervisor would leave behind, so what
is left is seen as its child.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import sys

import psutil
import pytest

from megarl.rollout.sandbox import Limits, PythonSandbox, SandboxFailed

_PR_SET_CHILD_SUBREAPER = 36
PYTHONS = {"uid": "/usr/bin/python3"}
IS_ROOT = os.getuid() == 0
LONG_S = 120.0


@contextlib.contextmanager
def nothing_left():
    """Orphans become ours; at the end there are none."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others.clear()
    others.update(all_children())
    before = set(others)
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
