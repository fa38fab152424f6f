"""Which servers a run has, where somebody else starts and ends them.

`rollout.servers` names a file with one address a line, or a name whose addresses are the servers:

    /shared/servers.txt              10.0.0.7:8000
                                     sglang://10.0.0.8:30000     # another engine than the run's
    dns://rollout.default.svc:8000   every address of that name, at that port

Both are read again and again: a server that appears gets weights at the next push and then
requests; one that is no longer there finishes what it has, and gets nothing new.
"""

import asyncio
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from megarl.errors import EngineError

ADDRESSES = ("MEGARL_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")
"""Environment variables that name the servers: `HOST:PORT,HOST:PORT`, the first that is set."""
READ_TIMEOUT_S = 30.0
_POLL_S = 1.0
_DNS = "dns://"


def addresses_in_environment() -> list[str]:
    """The servers that the environment names; none if it does not."""
    named = next((os.environ[name] for name in ADDRESSES if os.environ.get(name)), "")
    return [address.strip() for address in named.split(",") if address.strip()]


def named_servers(source: str | None, timeout_s: float) -> list[str]:
    """The servers to begin with, at least one. Not from within a loop.

    Args:
      source: `rollout.servers`; None is the environment.
      timeout_s: how long `source` may name none.

    Raises:
      EngineError: there are none.
    """
    if source is None:
        if addresses := addresses_in_environment():
            return addresses
        raise EngineError(f"no servers: set {ADDRESSES[0]} to HOST:PORT,HOST:PORT")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return asyncio.run(read_servers(source))
        except EngineError as error:
            if time.monotonic() > deadline:
                raise EngineError(f"{error}, for {timeout_s:g} s") from error
        time.sleep(_POLL_S)


async def read_servers(source: str) -> list[str]:
    """The addresses that `source` names now, each once, in its order.

    Raises:
      EngineError: it cannot be read, or names something else than `[ENGINE://]HOST:PORT`, or
        nothing, as a file does that is being written.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            if source.startswith(_DNS):
                return await _resolved(source)
            text = await asyncio.to_thread(Path(source).read_text, "utf-8")
    except TimeoutError as error:
        raise EngineError(f"rollout.servers: {source}: not read in {READ_TIMEOUT_S} s") from error
    except (OSError, ValueError) as error:
        raise EngineError(f"rollout.servers: {source}: {error}") from error
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    if addresses := list(dict.fromkeys(_checked(line, source) for line in lines if line)):
        return addresses
    raise EngineError(f"rollout.servers: {source} names no server")


async def _resolved(source: str) -> list[str]:
    name = urlsplit(source)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name.hostname, name.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{host}]:{name.port}" if ":" in host else f"{host}:{name.port}" for host in hosts]


def _checked(line: str, source: str) -> str:
    try:
        address = urlsplit(line if "://" in line else f"http://{line}")
        is_address = bool(address.hostname and address.port)
        is_address &= address.scheme in ("http", "vllm", "sglang")
    except ValueError:  # as of a bracket that is not closed
        is_address = False
    if not is_address:
        raise EngineError(f"rollout.servers: {source}: {line!r} is not [ENGINE://]HOST:PORT")
    return line
