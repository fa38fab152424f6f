"""For several files of this folder."""

import pytest

from megarl.rollout import fleet as fleet_module


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(fleet_module, "UNHEALTHY_LIMIT_S", 0.2)


@pytest.fixture(params=["namespaces", "uid", "process"])
def isolation(request):
    """Of a sandbox."""
    return request.param


@pytest.fixture(params=["namespaces", "uid"])
def wall(request):
    """Isolations that keep a hostile program in."""
    return request.param
