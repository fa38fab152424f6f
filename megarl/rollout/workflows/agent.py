"""Agents that are written with a client of OpenAI's or Anthropic's, as a workflow.

class Agent:
    async def run(self, data, base_url, api_key, **extra):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward
"""

import asyncio
import importlib
import importlib.util
import inspect
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout import workflow_context
from megarl.rollout.api import GenerationEngine, RolloutWorkflow, Row
from megarl.rollout.proxy.export import ExportStyle, export, export_run
from megarl.rollout.proxy.server import AgentProxy
from megarl.rollout.proxy.session import Limits
from megarl.rollout.proxy.template import ChatTemplate
from megarl.rollout.workflows.group import run_group
from megarl.rollout.workflows.rlvr import row_number
from megarl.trajectory import Trajectory, concat_padded


class AgentTimeout(Exception):
    """An agent did not return within its time."""


class AgentSampledNothing(Exception):
    """An agent returned without a completion: there is nothing to train."""


class AgentWorkflow(RolloutWorkflow):
    """Runs an agent against a proxy of the rollout loop, and trains what was sampled for it.

    `gconfig.n_samples` runs of the agent on a row go on at the same time and form a group.
    What the agent returns is its reward, on the last answer it got; see proxy.export for what
    earlier ones are worth. An agent that returns None has set rewards through the proxy, or
    its run is left out. What the agent raises rejects the episode, counted by its name.

    The agent runs in the rollout loop: it must not block it. Clients have to be the
    asynchronous ones.

    In an evaluation a run is one sample, and one row: that of its last answer, worth the sum of
    its rewards without a discount. A run that raises is a failed sample, which `failed` counts by
    its error. Requests may have sampling of their own.

    Args:
      agent: an object, a class, or the class's `package.module:Class`, with
        `async def run(self, data, **kw)`. It gets `base_url`, `api_key`, and `http_client`
        (an AsyncClient of httpx2, or of httpx where that is not installed, for this run alone)
        if it names it or takes any keyword. A client of OpenAI's or Anthropic's that is made
        without it takes 50 ms of the loop. One object runs all episodes.
      agent_options: arguments of the class.
      timeout_s: of one run.
      export_style, turn_discount: see proxy.export.
      limits: of the proxy, or its fields.

    Raises:
      ValueError: the agent has no `async def run`, options were given for an object or are not
        those of the class, timeout_s is not above 0, the tokenizer has no chat template, or what
        `export` refuses.
    """

    def __init__(
        self,
        agent: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        agent_options: Mapping[str, Any] | None = None,
        timeout_s: float = 3600.0,
        export_style: ExportStyle = "turns",
        turn_discount: float = 1.0,
        enable_thinking: bool = False,
        limits: Limits | Mapping[str, Any] | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
        if not 0 <= turn_discount <= 1 or export_style not in ("turns", "concat"):
            raise ValueError(
                "need turn_discount in [0, 1] and export_style turns or concat, got "
                f"{turn_discount}, {export_style!r}"
            )
        self.agent = _load(agent, agent_options or {})
        self._takes_http_client = _takes_http_client(self.agent.run)
        ChatTemplate(tokenizer)
        for name in ("httpx2", "httpx"):
            # A line for each request at INFO, which is the level of a run's terminal.
            if (requests := logging.getLogger(name)).level == logging.NOTSET:
                requests.setLevel(logging.WARNING)
        self.gconfig, self.tokenizer, self.timeout_s = gconfig, tokenizer, timeout_s
        self.export_style, self.turn_discount = export_style, turn_discount
        self.enable_thinking = enable_thinking
        self.limits: Limits | None = (
            _make(Limits, limits, "limits") if isinstance(limits, Mapping) else limits
        )
        self.failed: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def arun_episode(self, engine: GenerationEngine, data: Row) -> Trajectory | None:
        """The rows of all runs; None if none of them was given a reward."""
        proxy = await self._proxy_of_the_loop(engine)
        runs = (self._run(proxy, engine, data, i) for i in range(self.gconfig.n_samples))
        kept = await run_group(runs, self.failed)
        return concat_padded(kept) if kept else None

    async def _run(
        self, proxy: AgentProxy, engine: GenerationEngine, data: Row, index: int
    ) -> Trajectory | None:
        seed = self.gconfig.seed
        if seed is not None:  # of the row and the run, the same each time
            row = row_number(data) * self.gconfig.n_samples + index
            seed = (seed * 1_000_003 + row) * 4096 % (1 << 31)
        is_eval = workflow_context.get().is_eval
        session = proxy.open_session(
            engine=engine,
            gconfig=self.gconfig.new(n_samples=1, seed=seed),
            may_change_sampling=is_eval,
        )
        try:
            reward = await self._call(data, base_url=proxy.base_url, api_key=session.api_key)
        finally:
            if not session.is_ended:  # by the agent itself
                proxy.end(session.session_id)
        if not session.completions:
            raise AgentSampledNothing(f"{self._name} returned {reward!r} and asked for nothing")
        if reward is not None:
            session.set_reward(float(reward))
        if not session.has_reward:
            return None
        if is_eval:
            return export_run(session, self.export_style)
        return export(session, self.export_style, self.turn_discount)

    async def _call(self, data: Row, **access: str) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                if not self._takes_http_client:
                    return await self.agent.run(data, **access)
                # Its TLS is not needed here, and slow to set up.
                http = importlib.import_module(_http_package() or "httpx2")
                async with http.AsyncClient(verify=False, timeout=self.timeout_s) as client:
                    return await self.agent.run(data, http_client=client, **access)
        except TimeoutError as error:
            if not limit.expired():
                raise  # the agent's own
            raise AgentTimeout(f"{self._name} did not return within {self.timeout_s} s") from error

    @property
    def _name(self) -> str:
        return type(self.agent).__qualname__

    async def _proxy_of_the_loop(self, engine: GenerationEngine) -> AgentProxy:
        """One for all episodes. It ends with the loop, which cancels its tasks."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._proxy = AgentProxy(
                engine,
                self.tokenizer,
                self.gconfig,
                admin_key="",  # sessions are opened here alone
                enable_thinking=self.enable_thinking,
                limits=self.limits,
            )
            self._start = asyncio.create_task(self._proxy.start(), name="agent-proxy-start")
            self._keeper = asyncio.create_task(_close_with_loop(self._proxy), name="agent-proxy")
        await asyncio.shield(self._start)
        return self._proxy


async def _close_with_loop(proxy: AgentProxy) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await proxy.close()


def _load(agent: Any, options: Mapping[str, Any]) -> Any:
    target = agent
    if isinstance(agent, str):
        module, _, name = agent.partition(":")
        agent = getattr(importlib.import_module(module), name)
    if isinstance(agent, type):
        agent = _make(agent, options, "agent_options")
    elif options:
        raise ValueError("agent_options are for a class, not for an object")
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ValueError(f"{target!r} has no `async def run(self, data, **kw)`")
    return agent


def _make(made: type, options: Mapping[str, Any], name: str) -> Any:
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise ValueError(f"{name}: {made.__qualname__}: {error}") from error
    return made(**options)


def _takes_http_client(run: Any) -> bool:
    parameters = inspect.signature(run).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "http_client" in parameters or (takes_any and _http_package() is not None)


def _http_package() -> str | None:
    """What the clients' packages bring: openai 3 and anthropic 2.11 take clients of httpx2, and
    anthropic refuses those of httpx, which was what earlier ones took."""
    return next((p for p in ("httpx2", "httpx") if importlib.util.find_spec(p)), None)
