"""as_reward_fn: processes for what another process can import, a thread for the rest."""

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest
from reward_functions import behave

from megarl.config.load import load
from megarl.config.schema import RewardConfig
from megarl.rollout.rewards import RewardPool
from megarl.rollout.workflows.reward_fn import RLVRWorkflow, as_reward_fn
from megarl.rollout_head import RolloutHead

REPOSITORY = Path(__file__).parents[2]
CALL = ("prompt", "pid", [1], [2])


def call(function, **row):
    async def once():
        async with asyncio.timeout(120):
            return await function(*CALL, **row)

    return asyncio.run(once())


def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("given", [behave, "reward_functions:behave"])
def test_an_importable_function_runs_in_a_process_that_ends_with_its_loop(given, monkeypatch):
    tests = os.path.dirname(__file__)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
    function = as_reward_fn(given)
    first, second = call(function), call(function)
    assert len({first, second, float(os.getpid())}) == 3
    assert not alive(first)
    assert not alive(second)


def test_what_is_awaited_stays_as_it_is():
    async def reward(*args, **row):
        return 0.5

    pool = RewardPool("m:f", timeout_s=1, max_attempts=1, num_workers=1, on_failure="zero")
    assert as_reward_fn(reward) is reward
    assert as_reward_fn(pool) is pool


def test_a_function_of_the_script_runs_in_a_thread():
    seen = []

    def reward(prompt, completion, prompt_ids, completion_ids, answer):
        seen.append((threading.current_thread(), prompt, completion, answer))
        return 1

    assert call(as_reward_fn(reward), answer="7") == 1.0
    (thread, *values) = seen[0]
    assert values == ["prompt", "pid", "7"]
    assert thread is not threading.main_thread()


@pytest.mark.parametrize(("on_failure", "worth"), [("zero", 0.0), ("reject", None)])
def test_a_late_or_failing_one_is_worth_what_the_config_says(on_failure, worth, caplog):
    ended = threading.Event()

    def late(*args):
        ended.wait(60)
        return 1.0

    def broken(*args):
        raise KeyError("a bug in the user's reward")

    limits = RewardConfig(timeout_s=0.05, on_failure=on_failure)

    async def both():
        with caplog.at_level(logging.WARNING):
            slow, wrong = as_reward_fn(late, limits), as_reward_fn(broken, limits)
            values = [await slow(*CALL), await wrong(*CALL), await wrong(*CALL)]
            ended.set()
            return values

    assert asyncio.run(both()) == [worth] * 3
    assert len(caplog.records) == 2


def test_a_workflow_takes_any_of_them():
    assert callable(RLVRWorkflow(lambda *a, **k: 1.0, None, None).reward_fn)


def test_a_run_reports_its_rewards_counts(tmp_path, monkeypatch):
    """From the config's section to the row of a step, and on after the run was cut."""
    monkeypatch.chdir(REPOSITORY)
    config = load(
        REPOSITORY / "configs" / "quickstart.yaml",
        ["reward.max_attempts=1", "rollout.consumer_batch_size=32", "rollout.queue_size=64"],
    )
    state = None
    for times in (1, 2):
        head = RolloutHead(config, ["http://127.0.0.1:9"], tmp_path)
        head.engine.initialize()
        try:
            if state is not None:
                head.load_state_dict(state, version=1)
            wrong_row = head.rewards("1 + 1 =", "= 2", [1], [2], answer="none")
            assert head.engine.run(wrong_row, timeout_s=120) == 0.0
            stats, state = head.export_stats(), head.state_dict()
        finally:
            head.close()
        assert stats["running"] == 0.0
        assert stats["reward/failed"] == times
        assert stats["reward/attempts_failed/error"] == times
