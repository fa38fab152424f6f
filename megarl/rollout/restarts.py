"""Asking the launcher to start a server again.

A server can be sick and not dead: its HTTP process answers, and its engine does not. The trainer
notices, and the launcher, which can end processes, does not. So the trainer leaves a file named
after the server's port in a folder that both know.
"""

import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

FOLDER_ENV = "MEGARL_RESTARTS"
"""Set by a launcher that starts the servers; empty if it does not start them again."""


def folder() -> Path | None:
    """Where requests go; None if no launcher starts servers again."""
    named = os.environ.get(FOLDER_ENV)
    return Path(named) if named else None


def are_elsewhere() -> bool:
    """Whether somebody else than a launcher of this run starts and ends the servers."""
    return FOLDER_ENV not in os.environ


def comeback_s(setup_timeout_s: float) -> float:
    """How long a run without servers waits for one; 0 where nobody starts them again."""
    return setup_timeout_s if are_elsewhere() or folder() is not None else 0.0


def ask_for_restart(address: str) -> None:
    """Have the server of `http://HOST:PORT` ended and started; nothing if nobody would do it."""
    requests, port = folder(), urlsplit(address).port
    if requests is None or port is None:
        return
    try:
        (requests / str(port)).touch()
    except OSError as error:  # the run goes on without that server
        logger.warning("%s: no request for a restart could be left: %s", address, error)
