"""The clients that benchmarks/rollout.py compares; each runs in a process of its own."""

import asyncio
import dataclasses
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import torch
from scripted_server import delay_of
from timing import CheckFailed, PeakMemory

from megarl.config.schema import GenerationHyperparameters, InferenceEngineConfig
from megarl.rollout.api import GenerationEngine, Row
from megarl.rollout.backends.vllm import GENERATE_PATH, VLLMClient
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.trajectory import Trajectory

_TIMEOUT_S = 600.0
_PROMPT_TOKENS = 128
_MOST_TOKENS = 32000  # of the prompt: ids repeat after so many rows
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """`in_flight` requests at any time, as in_flight / group_size episodes."""

    in_flight: int
    group_size: int
    response_tokens: int
    num_requests: int
    """That are measured, after as many as twice those in flight."""
    delay_s: float = 0.0
    """Mean of the server's."""

    @property
    def num_episodes(self) -> int:
        """At the same time."""
        return max(1, self.in_flight // self.group_size)


class Rows:
    """Rows 0, 1, 2, ... without end."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self._taken = batch_size, 0

    def __next__(self) -> list[Row]:
        begin, self._taken = self._taken, self._taken + self.batch_size
        return [{"prompt": str(i), "row_id": i} for i in range(begin, self._taken)]


class Tokenizer:
    """Stands for one that costs nothing: the first token of a prompt is its number.

    Prompts have 65 to 128 tokens, so that a batch has padding.
    """

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        number = int(text) % _MOST_TOKENS
        return [number, *range(1, _PROMPT_TOKENS - number % (_PROMPT_TOKENS // 2))]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return ""


async def reward(*_: Any, row_id: int) -> float:
    return float(row_id % _MOST_TOKENS)


class Timed(RLVRWorkflow):
    """Notes how much later than the server's answer each episode ends."""

    def __init__(self, case: Case) -> None:
        gconfig = GenerationHyperparameters(
            n_samples=case.group_size, max_new_tokens=case.response_tokens, ignore_eos=True
        )
        super().__init__(reward, gconfig, Tokenizer())
        self.case = case
        self.overheads_s: list[float] = []

    async def arun_episode(self, engine: GenerationEngine, data: Row) -> Trajectory | None:
        begin = time.monotonic()
        trajectory = await super().arun_episode(engine, data)
        delay_s = delay_of(data["row_id"] % _MOST_TOKENS, self.case.delay_s)
        self.overheads_s.append(time.monotonic() - begin - delay_s)
        return trajectory


@dataclasses.dataclass
class Measured:
    """From `begin` to `end`: what the process used for `requests`."""

    begin: tuple[float, float, int] = (0.0, 0.0, 0)
    found: dict[str, float] = dataclasses.field(default_factory=dict)

    def start(self, done: int) -> None:
        self.begin = (time.monotonic(), time.process_time(), done)

    def end(self, done: int) -> None:
        wall_s = time.monotonic() - self.begin[0]
        cpu_s = time.process_time() - self.begin[1]
        requests = done - self.begin[2]
        self.found = {
            "requests": requests,
            "requests_per_s": requests / wall_s,
            "cpu_ms": 1e3 * cpu_s / requests,
            "cpu_share": cpu_s / wall_s,
        }

    def add_overheads(self, overheads_s: list[float]) -> None:
        quantiles = torch.tensor([0.5, 0.99], dtype=torch.float64)
        p50, p99 = torch.tensor(overheads_s, dtype=torch.float64).quantile(quantiles).tolist()
        self.found |= {"overhead_p50_ms": 1e3 * p50, "overhead_p99_ms": 1e3 * p99}


@contextmanager
def pool_of(case: Case, address: str) -> Iterator[tuple[RemoteInferenceEngine, Timed, Any]]:
    """An engine with `in_flight` requests whenever `step()` is called: one batch, checked."""
    batch_size = max(1, case.num_episodes // 2)
    config = InferenceEngineConfig(
        max_concurrent_rollouts=case.num_episodes, max_head_offpolicyness=3
    )
    client = VLLMClient(address, request_timeout_s=_TIMEOUT_S, retries=0)
    engine = RemoteInferenceEngine(config, [client], batch_size=batch_size)
    workflow, rows = Timed(case), Rows(batch_size)
    engine.initialize()

    def step() -> None:
        check(engine.prepare_batch(rows, workflow), batch_size, case)
        engine.set_version(engine.get_version() + 1)

    try:
        yield engine, workflow, step
    finally:
        engine.destroy()


def check(batch: Trajectory, batch_size: int, case: Case) -> None:
    """CheckFailed unless every row has its own prompt, its reward and all its tokens."""
    num_rows = batch_size * case.group_size
    if batch["input_ids"].shape[0] != num_rows:
        raise CheckFailed(f"a batch of {tuple(batch['input_ids'].shape)}, not {num_rows} rows")
    sampled = batch["loss_mask"].bool()
    if int(sampled.sum()) != num_rows * case.response_tokens:
        raise CheckFailed(f"{int(sampled.sum())} tokens were sampled in {num_rows} rows")
    if not torch.equal(batch["input_ids"][:, 0].float(), batch["rewards"]):
        raise CheckFailed("a reward is another row's")
    if batch["versions"][sampled].any() or not (batch["logprobs"][sampled] < 0).all():
        raise CheckFailed("a version or a logprob is not the server's")


def run_pool(case: Case, address: str) -> dict[str, float]:
    memory = PeakMemory(CPU)
    measured = Measured()
    with pool_of(case, address) as (engine, workflow, step):
        num_done = 0

        def done() -> int:
            return case.group_size * engine.executor.staleness.counts.accepted

        while num_done < 2 * case.in_flight:
            step()
            num_done = done()
        workflow.overheads_s.clear()
        measured.start(num_done)
        while num_done < measured.begin[2] + case.num_requests:
            step()
            num_done = done()
        measured.end(num_done)
        measured.add_overheads(list(workflow.overheads_s))
        counts = engine.export_stats()
    if counts["rejected"]:
        raise CheckFailed(f"episodes were rejected: {counts}")
    return measured.found | {"peak_bytes": memory.bytes()}


def run_bare(case: Case, address: str) -> dict[str, float]:
    memory = PeakMemory(CPU)
    measured = Measured()
    overheads_s: list[float] = []

    async def work(session: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            payload: dict[str, Any] = {"token_ids": Tokenizer().encode(str(number), False)}
            payload["sampling_params"] = {"max_tokens": case.response_tokens, "logprobs": 0}
            begin = time.monotonic()
            async with session.post(address + GENERATE_PATH, json=payload) as response:
                answer = json.loads(await response.read())
            delay_s = delay_of(number % _MOST_TOKENS, case.delay_s)
            overheads_s.append(time.monotonic() - begin - delay_s)
            if len(answer["choices"][0]["token_ids"]) != case.response_tokens:
                raise CheckFailed(f"{answer}")
            if number == 2 * case.in_flight:
                overheads_s.clear()
                measured.start(number)
            if number == 2 * case.in_flight + case.num_requests:
                measured.end(number)

    async def main() -> None:
        numbers = iter(range(3 * case.in_flight + case.num_requests + 1))
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(case.in_flight):
                tasks.create_task(work(session, numbers))

    asyncio.run(main())
    measured.add_overheads(overheads_s)
    return measured.found | {"peak_bytes": memory.bytes()}


def run_soak(case: Case, address: str) -> dict[str, float]:
    """Resident bytes after a tenth of `num_requests` episodes, and after all of them."""
    sizes = []
    with pool_of(case, address) as (engine, workflow, step):
        for target in (case.num_requests // 10, case.num_requests):
            while engine.executor.staleness.counts.accepted < target:
                step()
                workflow.overheads_s.clear()
            gc.collect()
            sizes.append(PeakMemory._status("VmRSS"))
    return {"episodes": case.num_requests, "bytes_at_tenth": sizes[0], "bytes_at_end": sizes[1]}
