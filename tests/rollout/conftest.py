"""For several files of this folder."""

import pytest

from megarl.rollout import fleet as fleet_module


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(fleet_module, "HEALTH_INTERVAL_S", 0.01)
    monkeypatch.setattr(fleet_module, "UNHEALTHY_LIMIT_S", 0.2)
