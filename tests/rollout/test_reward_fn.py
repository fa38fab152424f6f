"""as_reward_fn: processes for what another process can import, a thread for the rest."""

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest
from reward_functions import behave, behave_async

from megarl.config.load import load
from megarl.config.schema import RewardConfig
from megarl.errors import MegarlError
from megarl.rollout import rewards as module
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


def test_a_reward_stays_as_it_is():
    pool = RewardPool("m:f", timeout_s=1, max_attempts=1, num_workers=1, on_failure="zero")
    assert as_reward_fn(pool) is pool
    for made in (as_reward_fn(behave), as_reward_fn(lambda *args: 1.0)):
        assert as_reward_fn(made) is made


@pytest.mark.parametrize(
    ("completion", "worth", "reason"),
    [
        ("x", 3.0, None),
        ("reject", None, None),
        ("sleep", 0.0, "timeout"),
        ("raise", 0.0, "error"),
        ("nan", 0.0, "error"),
    ],
)
def test_an_async_function_of_the_script_has_limits_and_counts(completion, worth, reason):
    async def reward(*args, **row):
        return await behave_async(*args, **row)

    function = as_reward_fn(reward, RewardConfig(timeout_s=0.1, max_attempts=2))
    assert asyncio.run(function("p", completion, [1], [2, 3, 4])) == worth
    failed = {"reward/failed": 1.0, f"reward/attempts_failed/{reason}": 2.0}
    assert function.export_stats() == (failed if reason else {"reward/failed": 0.0})


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

    def not_a_number(*args):
        return float("nan")

    limits = RewardConfig(timeout_s=0.05, on_failure=on_failure)
    functions = [as_reward_fn(f, limits) for f in (late, broken, not_a_number)]

    async def each():
        with caplog.at_level(logging.WARNING):
            values = [await function(*CALL) for function in [*functions, functions[1]]]
        ended.set()
        return values

    assert asyncio.run(each()) == [worth] * 4
    assert [function.export_stats() for function in functions] == [
        {"reward/failed": 1.0, "reward/attempts_failed/timeout": 1.0},  # not tried again
        {"reward/failed": 2.0, "reward/attempts_failed/error": 6.0},
        {"reward/failed": 1.0, "reward/attempts_failed/error": 3.0},
    ]
    assert len(caplog.records) == 3


def test_so_many_run_in_threads_at_one_time_and_waiting_is_not_counted():
    running, most, both = set(), 0, threading.Barrier(2)

    def reward(*args):
        nonlocal most
        running.add(threading.get_ident())
        most = max(most, len(running))
        both.wait(120)
        running.discard(threading.get_ident())
        both.wait(120)
        return 1.0

    function = as_reward_fn(reward, RewardConfig(timeout_s=120.0, max_concurrent=2))

    async def calls():
        loop, passed_s = asyncio.get_running_loop(), 0.0
        clock = loop.time
        loop.time = lambda: clock() + passed_s
        async with function._slots(), function._slots():
            waiting = [asyncio.create_task(function(*CALL)) for _ in range(10)]
            await asyncio.sleep(0)
            passed_s = 1000.0  # by the loop's clock
            await asyncio.sleep(0.01)
        return await asyncio.gather(*waiting)

    assert asyncio.run(calls()) == [1.0] * 10
    assert most == 2
    assert function.export_stats() == {"reward/failed": 0.0}


def test_threads_that_hang_are_bounded_and_hold_up_nothing_else(monkeypatch):
    monkeypatch.setattr(module, "MAX_LEFT_THREADS", 3)
    ended = threading.Event()

    def reward(prompt, completion, prompt_ids, completion_ids):
        if completion == "hang":
            ended.wait(120)
        return 1.0

    # Not for want of time: the two good calls need some.
    function = as_reward_fn(reward, RewardConfig(timeout_s=2.0, max_concurrent=1))

    async def calls():
        hung = asyncio.gather(*(function("p", "hang", [], []) for _ in range(2)))
        assert await hung == [0.0, 0.0]
        assert await function("p", "x", [], []) == 1.0
        assert await asyncio.to_thread(lambda: 7) == 7
        assert await function("p", "hang", [], []) == 0.0
        with pytest.raises(MegarlError, match=r"3 calls are over 2.0 s late.*'package.module:f"):
            await function("p", "x", [], [])
        left = [t for t in threading.enumerate() if t.name == "reward reward"]
        assert all(thread.daemon for thread in left)
        ended.set()
        for thread in left:
            thread.join(120)
        return await function("p", "x", [], [])

    assert asyncio.run(calls()) == 1.0
    assert function.export_stats()["reward/attempts_failed/timeout"] == 3.0


def test_a_caller_that_goes_leaves_its_place_when_the_call_has_ended():
    ended, started = threading.Event(), threading.Event()

    def reward(*args):
        started.set()
        ended.wait(120)
        return 1.0

    function = as_reward_fn(reward, RewardConfig(timeout_s=120.0, max_concurrent=1))

    async def calls():
        first = asyncio.create_task(function(*CALL))
        await asyncio.to_thread(started.wait, 120)
        first.cancel()
        await asyncio.wait([first], timeout=120)
        assert first.cancelled()
        second = asyncio.create_task(function(*CALL))
        await asyncio.sleep(0)
        assert sum(t.name == "reward reward" for t in threading.enumerate()) == 1
        ended.set()
        async with asyncio.timeout(120):
            return await second

    assert asyncio.run(calls()) == 1.0
    assert function.export_stats() == {"reward/failed": 0.0}


def test_counts_go_on_in_another_loop(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    function = as_reward_fn("reward_functions:behave_async", RewardConfig(max_attempts=1))
    workflow = RLVRWorkflow(function, None, None)
    for times in (1, 2):
        assert asyncio.run(function("p", "raise", [1], [2])) == 0.0
        assert workflow.export_stats() == {
            "reward/failed": times,
            "reward/attempts_failed/error": times,
        }


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
