import pytest
from sglang_server import running_sglang
from tiny_server import REQUEST_TIMEOUT_S, LoopThread

from megarl.rollout.backends.sglang import SGLangClient


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """One real SGLang server for the whole session. Its weights are whatever was pushed last."""
    with running_sglang(tmp_path_factory.mktemp("sglang")) as server:
        yield server


@pytest.fixture
def sglang_loop(sglang_server):
    """A loop with one client, of `sglang_server`."""
    client = SGLangClient(sglang_server.address, request_timeout_s=REQUEST_TIMEOUT_S, retries=1)
    thread = LoopThread([client])
    yield thread
    thread.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "sglang_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.server)
