import os
import signal
import tempfile

import hypothesis
import pytest
from tiny_server import REQUEST_TIMEOUT_S, LoopThread, running_server

from megarl.ops import build
from megarl.rollout.backends.vllm import VLLMClient

# Traces of earlier runs would hide a broken one.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="megarl-test-cache-")

# Before a test imports them: kernels that are those of csrc/ as it stands.
build.build()

# Under nohup or in the background of a shell these are ignored, and so they would be in every
# process that a test starts and then sends them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A loaded machine is slow, and a timing is not a test.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory):
    """One real vLLM server for the whole session. Its weights are whatever was pushed last."""
    with running_server(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def vllm_loop(vllm_server):
    """A loop with one client, of `vllm_server`."""
    client = VLLMClient(vllm_server.address, request_timeout_s=REQUEST_TIMEOUT_S, retries=1)
    thread = LoopThread([client])
    yield thread
    thread.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "vllm_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)
