"""How often a server is started again; its processes and the clock are made up."""

from types import SimpleNamespace

import pytest

from megarl.launch import servers as servers_module
from megarl.launch.servers import Servers


class Process:
    """Runs until `code` is set."""

    name, log, port = "server 0", None, 1

    def __init__(self, lives):
        self.lives, self.code = lives, None

    def start(self):
        self.lives.append(self)

    def poll(self):
        return self.code

    def again(self):
        return Process(self.lives)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(servers_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(servers_module, "_listens", lambda process: True)
    return now


@pytest.mark.parametrize(("up_s", "end"), [(3599.0, 3), (3601.0, None)])
def test_an_hour_without_trouble_begins_the_count_anew(clock, up_s, end):
    lives = []
    servers = Servers([Process(lives)], restarts=2)
    servers.start()
    for _ in range(3):
        clock.s += 2.0
        assert servers.poll() is None  # it is seen to be up
        clock.s += up_s
        lives[-1].code = 3
        code = servers.poll()
        clock.s += 2.0
        if code is None:
            assert servers.poll() is None  # started again
    assert code == end
    assert len(lives) == (3 if end else 4)
