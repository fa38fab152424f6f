"""RewardPool with real processes: what hangs is killed, what dies is replaced."""

import asyncio
import os
import time

import pytest

from megarl.config.schema import RewardConfig
from megarl.errors import MegarlError
from megarl.rollout.proxy.server import ADMIN_KEY
from megarl.rollout.rewards import AsyncReward, RewardPool
from megarl.rollout.workflows.reward_fn import make_reward

TIMEOUT_S = 1.0


@pytest.fixture(autouse=True)
def _functions_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))


def run(calls, **options):
    """Results of `calls(pool)` and the pool, whose processes have ended."""
    options = {
        "fn": "reward_functions:behave",
        "timeout_s": TIMEOUT_S,
        "max_attempts": 2,
        "num_workers": 2,
        "on_failure": "zero",
        **options,
    }
    pool = RewardPool(**options)

    async def main():
        try:
            return await calls(pool)
        finally:
            await pool.close()

    return asyncio.run(main()), pool


def score(pool, completion, **row):
    return pool("prompt", completion, [1, 2], [3, 4, 5], **row)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rewards_come_back_to_their_callers():
    async def calls(pool):
        return await asyncio.gather(*(score(pool, "x", bonus=i) for i in range(50)))

    results, pool = run(calls)
    assert results == [3.0 + i for i in range(50)]
    assert not pool.failures


@pytest.mark.parametrize("how", ["hang", "sleep in C"])
def test_a_call_that_hangs_is_killed_and_the_pool_goes_on(how):
    async def calls(pool):
        started = time.monotonic()
        before = int(await score(pool, "pid"))
        hung, good = await asyncio.gather(score(pool, how), score(pool, "x"))
        return hung, good, before, await score(pool, "x"), time.monotonic() - started

    (hung, good, before, after, seconds), pool = run(calls, num_workers=1)
    assert (hung, good, after) == (0.0, 3.0, 3.0)
    assert pool.failures == {"timeout": 2}
    assert not is_alive(before)
    assert seconds < 60  # two timeouts of 1 s and three process starts, not a hang


def test_a_crash_is_counted_and_the_process_replaced():
    async def calls(pool):
        return await score(pool, "die"), await score(pool, "x")

    results, pool = run(calls, num_workers=1)
    assert results == (0.0, 3.0)
    assert pool.failures == {"crash": 2}


@pytest.mark.parametrize("completion", ["raise", "text", "nan"])
def test_an_error_is_zero_or_a_rejection_by_config(completion):
    async def calls(pool):
        return await score(pool, completion)

    assert run(calls)[0] == 0.0
    rejected, pool = run(calls, on_failure="reject", max_attempts=3)
    assert rejected is None
    assert pool.failures == {"error": 3}


def test_what_a_function_prints_does_not_reach_the_protocol():
    async def calls(pool):
        return [await score(pool, "print") for _ in range(3)]

    assert run(calls)[0] == [3.0, 3.0, 3.0]


def test_a_module_that_cannot_be_imported_is_a_crash():
    async def calls(pool):
        return await score(pool, "x")

    result, pool = run(calls, fn="no_such_module:f", max_attempts=1)
    assert result == 0.0
    assert pool.failures == {"crash": 1}


def test_no_process_is_left_after_close():
    async def calls(pool):
        return await asyncio.gather(*(score(pool, "pid") for _ in range(8)))

    pids, _ = run(calls)
    assert len(set(pids)) == 2
    assert not any(is_alive(int(pid)) for pid in pids)


def test_a_closed_pool_starts_no_process():
    async def calls(pool):
        await pool.close()
        with pytest.raises(MegarlError, match="reward_functions:behave: called after"):
            await score(pool, "fine")
        return None

    run(calls)


def test_options_are_keywords_of_each_call_under_the_rows_own():
    async def calls(pool):
        return await score(pool, "x"), await score(pool, "x", bonus=1)

    results, pool = run(calls, options={"bonus": 5})
    assert results == (8.0, 4.0)
    assert pool.export_stats() == {"reward/failed": 0.0}


def test_no_key_of_ours_reaches_the_processes(monkeypatch):
    RewardConfig(url="http://127.0.0.1:1/classify", api_key_env="KEY_OF_A_JUDGE")
    for name in (ADMIN_KEY, "KEY_OF_A_JUDGE", "ANOTHER"):
        monkeypatch.setenv(name, "s3cret")

    async def calls(pool):
        names = (ADMIN_KEY, "KEY_OF_A_JUDGE", "ANOTHER")
        return [await score(pool, "variable", name=name) for name in names]

    assert run(calls)[0] == [0.0, 0.0, 1.0]


# ---------------------------------------------------------------- functions that are awaited


def awaited(calls, **config):
    """Results of `calls(reward)` and the reward, which a config has named."""
    reward = make_reward(RewardConfig(fn="reward_functions:behave_async", **config))
    assert isinstance(reward, AsyncReward)

    async def main():
        try:
            async with asyncio.timeout(120):
                return await calls(reward)
        finally:
            await reward.close()

    return asyncio.run(main()), reward


def test_an_async_function_of_a_config_is_awaited_in_the_loop():
    async def calls(reward):
        return [await score(reward, text) for text in ("x", "pid", "reject")]

    results, reward = awaited(calls, options={"bonus": 4})
    assert results == [7.0, os.getpid(), None]
    assert not reward.failures


@pytest.mark.parametrize(
    ("completion", "reason"),
    [("sleep", "timeout"), ("raise", "error"), ("text", "error"), ("inf", "error")],
)
@pytest.mark.parametrize(("on_failure", "worth"), [("zero", 0.0), ("reject", None)])
def test_a_late_or_failing_async_function_is_worth_what_the_config_says(
    completion, reason, on_failure, worth
):
    async def calls(reward):
        return await score(reward, completion)

    result, reward = awaited(calls, timeout_s=0.1, max_attempts=2, on_failure=on_failure)
    assert result is worth or result == worth
    assert reward.export_stats() == {
        "reward/failed": 1.0,
        f"reward/attempts_failed/{reason}": 2.0,
    }


def test_a_timeout_of_the_functions_own_is_an_error():
    async def calls(reward):
        return await score(reward, "own timeout")

    _, reward = awaited(calls, max_attempts=1)
    assert reward.failures == {"error": 1}


def test_so_many_calls_are_awaited_at_one_time_and_waiting_is_not_counted():
    async def calls(reward):
        return await asyncio.gather(*(score(reward, "most") for _ in range(8)))

    results, reward = awaited(calls, max_concurrent=2, timeout_s=60.0)
    assert max(results) == 2.0

    async def late(reward):
        return await asyncio.gather(*(score(reward, "nap") for _ in range(6)))

    results, reward = awaited(late, max_concurrent=1, timeout_s=2.0)  # 6 * 0.5 s in a row
    assert results == [3.0] * 6
    assert not reward.failures
