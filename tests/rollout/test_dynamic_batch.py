"""WorkflowExecutor.prepare with dynamic batches, on an engine that only has a version."""

import asyncio
import itertools

import pytest
import torch

from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.executor import WorkflowExecutor
from megarl.rollout.staleness import StalenessManager

WAIT_S = 120.0


class Engine:
    version = 0

    def get_version(self):
        return self.version


def trajectory(value):
    return {
        "input_ids": torch.tensor([[1, 2]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 2, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1]], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0, -1.0]]),
        "rewards": torch.tensor([float(value)]),
    }


class Judged(RolloutWorkflow):
    """Episode i is accepted if `verdicts[i]`; notes the version at which each started."""

    def __init__(self, verdicts, delay=lambda i: 0):
        self.verdicts, self.delay, self.born = verdicts, delay, {}

    async def arun_episode(self, engine, data):
        index = data["i"]
        self.born[index] = engine.get_version()
        for _ in range(self.delay(index)):
            await asyncio.sleep(0)
        return trajectory(index) if self.verdicts(index) else None


class Rows:
    def __init__(self, size):
        self._numbers, self._size = itertools.count(), size

    def __next__(self):
        return [{"i": next(self._numbers)} for _ in range(self._size)]


def pool(*, batch_size=4, eta=0, most=64):
    engine = Engine()
    return engine, WorkflowExecutor(engine, StalenessManager(most, batch_size, eta))


def rewards(episodes):
    return [episode["rewards"].item() for episode in episodes]


def run(main):
    async def limited():
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(limited())


def test_a_dynamic_batch_is_what_was_accepted_of_its_episodes():
    async def main():
        engine, executor = pool()
        workflow, rows = Judged(lambda i: i % 4 < 2), Rows(4)
        for version in range(3):
            batch = await executor.prepare(rows, workflow, is_dynamic=True)
            assert rewards(batch) == [4 * version, 4 * version + 1]
            # None took the place of a rejected one.
            assert sorted(workflow.born) == list(range(4 * version + 4))
            engine.version += 1
            executor.admit()
        assert executor.export_stats()["rejected/workflow returned None"] >= 6
        await executor.close()

    run(main)


def test_filtered_and_failed_episodes_use_up_their_places_too():
    class Failing(Judged):
        async def arun_episode(self, engine, data):
            if data["i"] == 1:
                raise KeyError("a bug in the user's workflow")
            return await super().arun_episode(engine, data)

    async def main():
        _, executor = pool()
        batch = await executor.prepare(
            Rows(4), Failing(lambda i: True), lambda t: t["rewards"].item() != 2, is_dynamic=True
        )
        assert rewards(batch) == [0, 3]
        await executor.close()

    run(main)


@pytest.mark.parametrize("eta", [0, 2])
def test_a_batch_of_which_all_are_rejected_is_passed_over(eta):
    async def main():
        _, executor = pool(eta=eta)
        workflow = Judged(lambda i: i >= 9)
        batch = await executor.prepare(Rows(4), workflow, is_dynamic=True)
        assert rewards(batch) == [9, 10, 11]
        await executor.close()

    run(main)


def test_rejected_episodes_are_replaced_while_too_few_were_accepted():
    async def main():
        engine, executor = pool()
        rows, workflow = Rows(4), Judged(lambda i: i % 4 == 0)
        batch = await executor.prepare(rows, workflow, is_dynamic=True, fewest=2)
        assert rewards(batch) == [0, 4]
        assert sorted(workflow.born) == list(range(7))  # 4, 5 and 6 for 1, 2 and 3
        engine.version += 1
        executor.admit()
        assert rewards(await executor.prepare(rows, workflow, is_dynamic=True)) == [8]
        for fewest in (0, 5):
            with pytest.raises(ValueError, match=f"fewest: expected 1 to 4 episodes, got {fewest}"):
                await executor.prepare(rows, workflow, is_dynamic=True, fewest=fewest)
        await executor.close()

    run(main)


@pytest.mark.parametrize(
    ("is_dynamic", "fewest"), [(False, 1), (True, 1), (True, 3)], ids=["fixed", "dynamic", "least"]
)
@pytest.mark.parametrize("eta", [0, 1, 3])
def test_no_episode_is_trained_on_beyond_the_bound(is_dynamic, fewest, eta):
    """Rejections and lengths of every kind; batches are in order of submission."""

    async def main():
        engine, executor = pool(eta=eta, most=7)
        workflow = Judged(lambda i: i * 7919 % 5 > 1, delay=lambda i: i * 31 % 17)
        rows, taken = Rows(4), []
        for _ in range(40):
            episodes = await executor.prepare(rows, workflow, is_dynamic=is_dynamic, fewest=fewest)
            batch = rewards(episodes)
            assert fewest <= len(batch) <= 4
            assert is_dynamic or len(batch) == 4
            assert batch == sorted(batch)
            assert all(0 <= engine.version - workflow.born[i] <= eta for i in batch)
            taken += batch
            engine.version += 1
            executor.admit()
        assert len(set(taken)) == len(taken)
        await executor.close()

    run(main)


def test_rejected_places_survive_a_restart():
    """What had ended is one batch again, no more and no less, and nothing runs for it."""

    async def settled(executor, count):
        while executor.staleness.counts.running or len(executor._finished) < count:  # noqa: ASYNC110 - counts have no event
            await asyncio.sleep(0)

    async def main():
        engine, executor = pool(eta=1)
        rows = Rows(4)
        workflow = Judged(lambda i: i in (0, 2, 5, 7))
        assert rewards(await executor.prepare(rows, workflow, is_dynamic=True)) == [0, 2]
        await settled(executor, 4)
        state = executor.state_dict()
        assert [(row["i"], done is not None) for row, done in state["pending"]][:2] == [
            (5, True),
            (7, True),
        ]
        assert (state["spent"], state["rejected_before"]) == (2, [0, 1])
        await executor.close()

        engine, again = pool(eta=1)
        engine.version = 1
        fresh = Judged(lambda i: True)
        again.load_state_dict(state, 1, fresh)
        assert rewards(await again.prepare(rows, fresh, is_dynamic=True)) == [5, 7]
        await settled(again, 4)
        # Of version 1: the batch of 4 that step 2 is about to take, and none besides.
        assert sorted(fresh.born) == [8, 9, 10, 11]
        assert again.staleness.spent == 4
        assert again.export_stats()["submitted"] == executor.export_stats()["submitted"] + 4
        await again.close()

    run(main)


@pytest.mark.parametrize("eta", [0, 2])
def test_a_batch_more_than_a_version_has_is_an_error(eta):
    """Nobody could bring the next version: who would do it waits for the batch."""

    async def main():
        engine, executor = pool(eta=eta)
        rows, workflow = Rows(4), Judged(lambda i: i % 4 < 2)
        for _ in range(eta + 1):
            await executor.prepare(rows, workflow)
        with pytest.raises(ValueError, match=r"at version 0 was taken: set_version\(1\) comes"):
            await executor.prepare(rows, workflow)
        engine.version = 1
        executor.admit()
        await executor.prepare(rows, workflow)
        await executor.close()

    run(main)


def test_fixed_batches_after_dynamic_ones_are_full():
    async def main():
        engine, executor = pool(eta=1)
        rows, workflow = Rows(4), Judged(lambda i: i % 4 < 2)
        assert rewards(await executor.prepare(rows, workflow, is_dynamic=True)) == [0, 1]
        engine.version += 1
        executor.admit()
        assert rewards(await executor.prepare(rows, workflow)) == [4, 5, 8, 9]
        assert executor.staleness.spent == 2
        await executor.close()

    run(main)


def test_close_ends_every_episode_and_leaves_no_task():
    ended = []

    class Endless(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(data["i"])

    async def main():
        _, executor = pool()
        for i in range(3):
            executor.submit({"i": i}, Endless())
        others = asyncio.create_task(
            executor.run_each([{"i": 3}, {"i": 4}], Endless(), is_eval=True)
        )
        for _ in range(10):
            await asyncio.sleep(0)
        await executor.close()
        assert sorted(ended) == [0, 1, 2, 3, 4]
        with pytest.raises(asyncio.CancelledError):
            await others
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())  # without a limit, which is a task of its own nowhere
