"""How long ranks wait for each other."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.train import COLLECTIVE_LIMIT_S, collective_limit_s

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(("setup_s", "least_s"), [(600.0, COLLECTIVE_LIMIT_S), (7200.0, 7260.0)])
def test_ranks_wait_while_rank_0_waits_for_servers(setup_s, least_s):
    config = load(CONFIGS / "quickstart.yaml", [])
    config = replace(config, rollout=replace(config.rollout, setup_timeout_s=setup_s))
    # RolloutHead.start gives the servers a minute more than their limit.
    assert collective_limit_s(config) >= least_s


def test_fine_tuning_has_no_servers():
    config = load(CONFIGS / "quickstart_sft.yaml", [])
    assert collective_limit_s(config) == COLLECTIVE_LIMIT_S
