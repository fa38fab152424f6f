"""One process that runs a user's reward function, call by call.

    stdin   8-byte length, JSON {"args": [...], "kwargs": {...}}
    stdout  8-byte length, JSON {"ready": true} once, then {"value": number} or {"error": text}

JSON, so that nothing the parent reads can run code. What the function prints goes to stderr.
The process ends with its stdin, so it never outlives the pool. Imports no torch itself.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
import traceback
from typing import Any, BinaryIO

HEADER = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def read_message(stream: BinaryIO) -> Any:
    """The next message, None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(stream.read(HEADER.unpack(header)[0]))


def encode_message(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def load_function(target: str) -> Any:
    """`package.module:function`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def call(function: Any, message: dict[str, Any]) -> dict[str, Any]:
    """The answer to one message. Whatever the function raises is an answer too."""
    try:
        return {"value": float(function(*message["args"], **message["kwargs"]))}
    except Exception as error:  # noqa: BLE001 - the user's code: its error is the answer
        return {"error": "".join(traceback.format_exception_only(error)).strip()}


def main(target: str, memory_bytes: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # print() of the function must not reach the protocol
    messages = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    function = load_function(target)
    answers.write(encode_message({"ready": True}))
    answers.flush()
    while (message := read_message(messages)) is not None:
        answers.write(encode_message(call(function, message)))
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(sys.argv[1], int(sys.argv[2]))
