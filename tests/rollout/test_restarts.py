"""Who starts servers again, as a trainer sees it."""

import pytest

from megarl.rollout import restarts


@pytest.mark.parametrize(
    ("value", "are_elsewhere", "comeback_s"),
    [(None, True, 600.0), ("", False, 0.0), ("/run/restarts", False, 600.0)],
    ids=["nobody we know", "a launcher, never", "a launcher"],
)
def test_a_run_waits_where_somebody_may_bring_a_server_back(
    monkeypatch, value, are_elsewhere, comeback_s
):
    monkeypatch.delenv(restarts.FOLDER_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(restarts.FOLDER_ENV, value)
    assert restarts.are_elsewhere() == are_elsewhere
    assert restarts.comeback_s(600.0) == comeback_s
    assert (restarts.folder() is not None) == bool(value)
