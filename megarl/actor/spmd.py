"""The trainer as an SPMD script sees it: an object a model, made step by step.

    actor = MegatronPPOActor(config.actor)
    actor.create_process_group(parallel_strategy)
    actor.initialize(None, ft_spec)
    actor.connect_engine(rollout, meta)
    for global_step in range(ft_spec.total_train_steps):
        batch = actor.prepare_batch(dataloader, granularity=g, workflow=workflow)
        ...

All that computes is in the parts it holds: MegatronEngine, PPOActor, ScriptCoordinator, a
Pusher. Every rank runs the same script; every method is collective over the world unless
it says otherwise.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from megarl.actor import world
from megarl.actor.checkpoint import save_hf
from megarl.actor.coordinator import ScriptCoordinator
from megarl.actor.engine import MegatronEngine
from megarl.actor.meta import FinetuneSpec, ParallelStrategy, SaveLoadMeta, WeightUpdateMeta
from megarl.actor.micro_batch import Batch
from megarl.actor.policy import PPOActor
from megarl.actor.state import StateWriter, latest_state, load_state
from megarl.actor.weight_push import make_pusher
from megarl.bridge.push import Pusher
from megarl.config.schema import PPOActorConfig, TrainEngineConfig, WeightUpdateConfig
from megarl.errors import CheckpointError
from megarl.model.weights import load_hf
from megarl.parallel import Mesh
from megarl.rollout.api import AcceptFn, Row
from megarl.rollout.remote import RemoteVLLMEngine
from megarl.rollout.workflows import WorkflowLike
from megarl.stats import tracker as stats_tracker

T = TypeVar("T")


class TrainEngine(Protocol):
    """What a script, and the code it shares with others, needs of a trained model."""

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None: ...
    def initialize(self, addr: str | None, ft_spec: FinetuneSpec) -> None: ...
    def destroy(self) -> None: ...
    @property
    def data_parallel_rank(self) -> int: ...
    @property
    def data_parallel_world_size(self) -> int: ...
    def is_data_parallel_head(self) -> bool: ...
    def connect_engine(self, engine: RemoteVLLMEngine, meta: WeightUpdateMeta) -> None: ...
    def update_weights(self, meta: WeightUpdateMeta) -> None: ...
    def set_version(self, version: int) -> None: ...
    def get_version(self) -> int: ...
    def save(self, meta: SaveLoadMeta) -> None: ...
    def load(self, meta: SaveLoadMeta) -> None: ...
    def step_lr_scheduler(self) -> None: ...


class MegatronPPOActor:
    """A policy that learns by PPO or GRPO, or a frozen reference.

    Args:
      config: section `actor` of a run; section `ref` makes a reference, which has
        `compute_logp` only.
      seed: of new weights and of minibatches; a script gives the run's.
      max_response_tokens: the length limit that `overlong_reward_penalty` counts back from; a
        script gives `gconfig.max_new_tokens`.

    Raises:
      ValueError: overlong_reward_penalty without max_response_tokens.
    """

    def __init__(
        self, config: TrainEngineConfig, *, seed: int = 1, max_response_tokens: int | None = None
    ) -> None:
        if (
            isinstance(config, PPOActorConfig)
            and config.overlong_reward_penalty
            and max_response_tokens is None
        ):
            raise ValueError("actor.overlong_reward_penalty: true needs max_response_tokens")
        self.config, self.seed = config, seed
        # Without the penalty nothing reads it.
        self._max_response_tokens = max_response_tokens or sys.maxsize
        self._mesh: Mesh | None = None
        self._engine: MegatronEngine | None = None
        self._policy: PPOActor | None = None
        self._rollout: RemoteVLLMEngine | None = None
        self._coordinator: ScriptCoordinator | None = None
        self._pusher: Pusher | None = None
        self._sends_as: WeightUpdateMeta | None = None
        self._pushed = 0
        """What the servers call the weights of the last push."""
        self._batch_stats: dict[str, float] = {}

    # ------------------------------------------------------------------ begin and end

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the world of the ranks that run this script.

        Args:
          parallel_strategy: how the ranks are laid out; None is what the config says.

        Raises:
          ValueError: the world has another size, or an earlier model another layout.
        """
        if self._mesh is not None:
            return
        layout = self.config.parallel
        if parallel_strategy is not None:
            layout = parallel_strategy.as_config(like=layout)
            if parallel_strategy.world_size != world.size():
                raise ValueError(f"{parallel_strategy} is not a layout of {world.size()} ranks")
        self._mesh = world.join(layout, self.seed)

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Build the model and load the weights of `config.path`.

        Args:
          addr: not read.
          ft_spec: the length of the run, for the learning rate's schedule.
        """
        self.create_process_group()
        steps = ft_spec.total_train_steps if ft_spec is not None else 1
        self._engine = MegatronEngine(self.config, self.mesh, total_steps=steps)
        if isinstance(self.config, PPOActorConfig):
            self._policy = PPOActor(
                self.config,
                self._engine,
                max_response_tokens=self._max_response_tokens,
                stats=stats_tracker._default,
            )

    def destroy(self) -> None:
        """Let go of the model and the servers; the last one ends the process group."""
        if self._pusher is not None:
            self._pusher.close()
        self._engine = self._policy = self._pusher = self._coordinator = self._rollout = None
        if self._mesh is not None:
            self._mesh = None
            world.leave()

    @property
    def mesh(self) -> Mesh:
        """RuntimeError before `create_process_group`."""
        return _made(self._mesh, "create_process_group")

    @property
    def engine(self) -> MegatronEngine:
        """RuntimeError before `initialize`."""
        return _made(self._engine, "initialize")

    @property
    def policy(self) -> PPOActor:
        """RuntimeError before `initialize`, and of a reference."""
        if self._engine is not None and self._policy is None:
            raise RuntimeError("a frozen reference has compute_logp only")
        return _made(self._policy, "initialize")

    # ------------------------------------------------------------------ this rank

    @property
    def data_parallel_rank(self) -> int:
        return self.mesh.place.dp

    @property
    def data_parallel_world_size(self) -> int:
        return self.mesh.dp

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        return self.mesh.dp_group

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """All ranks, gloo: what `stats_tracker.export` reduces over."""
        return self.mesh.cpu_group

    def is_data_parallel_head(self) -> bool:
        """Whether this rank is the first of its data-parallel replica. Not collective."""
        return self.mesh.rank == self.mesh.replica_ranks[0]

    # ------------------------------------------------------------------ servers

    def connect_engine(self, engine: RemoteVLLMEngine, meta: WeightUpdateMeta) -> None:
        """From now on `engine` makes the episodes, and has this model's weights.

        Raises:
          WeightUpdateError: a server did not take them.
        """
        self._rollout = engine
        self._coordinator = ScriptCoordinator(engine, self)
        if self._pusher is not None:
            self._pusher.close()
        self._pusher = make_pusher(
            WeightUpdateConfig(
                mode="disk" if meta.type == "disk" else "auto",
                bucket_bytes=meta.weight_chunked_mem_mb << 20,
                pause=meta.pause,
                timeout_s=meta.timeout_s,
            ),
            engine.engine if engine.is_head else None,
            self.engine,
            folder=Path(meta.path) if meta.path else None,
        )
        self._sends_as = meta
        self._push(self.engine.version)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """The weights into every server, as `meta.version` or the version after the actor's.

        `set_version` of actor and rollout engine is to follow.

        Raises:
          ValueError: `meta` is another way than connect_engine was given.
          WeightUpdateError: a server did not take them.
        """
        known = _made(self._sends_as, "connect_engine")
        if (meta.type, meta.path) != (known.type, known.path):
            raise ValueError(
                f"weights go by {known.type} {known.path or ''}, as connect_engine was told, not "
                f"by {meta.type} {meta.path or ''}"
            )
        self._push(self.engine.version + 1 if meta.version is None else meta.version)

    def refit(self) -> None:
        """The present weights into every server once more: some may have come back without.

        Raises:
          WeightUpdateError: a server did not take them.
        """
        self._push(self._pushed)

    def _push(self, version: int) -> None:
        pusher, rollout = self._pusher, _made(self._rollout, "connect_engine")
        _made(pusher, "connect_engine").push(self.engine.export, version)
        self._pushed = version
        if rollout.is_head:
            rollout.on_pushed(version)
        dist.barrier(group=self.cpu_group)

    def set_version(self, version: int) -> None:
        """The model's weights are `version`. Not collective."""
        self.engine.version = version

    def get_version(self) -> int:
        return self.engine.version

    # ------------------------------------------------------------------ episodes

    def prepare_batch(
        self,
        dataloader: Any,
        granularity: int = 1,
        workflow: WorkflowLike | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        should_accept: AcceptFn | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> Batch:
        """This replica's rows of the next batch; generation of later ones goes on.

        See ScriptCoordinator.prepare_batch. `should_accept` is an older name of
        `should_accept_fn`.
        """
        coordinator = _made(self._coordinator, "connect_engine")
        return coordinator.prepare_batch(
            dataloader,
            granularity,
            workflow,
            should_accept_fn or should_accept,
            workflow_kwargs=workflow_kwargs,
            group_size=group_size,
            dynamic_bs=dynamic_bs,
        )

    def rollout_batch(
        self,
        data: list[Row],
        granularity: int = 1,
        workflow: WorkflowLike | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        *,
        should_accept: AcceptFn | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        group_size: int = 1,
    ) -> Batch:
        """This replica's rows of the episodes of `data`, generated now.

        See ScriptCoordinator.rollout_batch.
        """
        coordinator = _made(self._coordinator, "connect_engine")
        return coordinator.rollout_batch(
            data,
            granularity,
            workflow,
            should_accept_fn or should_accept,
            workflow_kwargs=workflow_kwargs,
            group_size=group_size,
        )

    # ------------------------------------------------------------------ a step

    def compute_logp(self, batch: Batch) -> Tensor:
        """Logprobs [B, S] float32; index t is of token t + 1."""
        return self.engine.forward(batch)

    def compute_advantages(self, batch: Batch) -> dict[str, float]:
        """Add what the loss reads, see PPOActor.compute_advantages.

        `prox_logp` is computed where the loss needs it and the script has not.

        Returns:
          `reward` and other means of the batch, the same on every rank; `ppo_update` returns
          them as well.
        """
        if self.policy.needs_prox_logp and "prox_logp" not in batch:
            batch["prox_logp"] = self.compute_logp(batch)
        self._batch_stats = self.policy.compute_advantages(batch)
        return dict(self._batch_stats)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """The optimizer steps of a batch.

        Returns:
          `loss`, `grad_norm`, ... and the batch's own means; the same on every rank.

        Raises:
          NonFiniteError: see MegatronEngine.train_batch.
        """
        stats = self.policy.ppo_update(batch)
        batch_stats, self._batch_stats = self._batch_stats, {}
        return {**batch_stats, **stats}

    def step_lr_scheduler(self) -> None:
        """Move the learning-rate schedule one step on. Not collective."""
        self.engine.step_lr_scheduler()

    # ------------------------------------------------------------------ disk

    def save(self, meta: SaveLoadMeta) -> None:
        """The model as an HF folder, or with optimizer and schedule as a sharded checkpoint."""
        folder = Path(meta.path)
        if meta.weight_format == "dcp":
            StateWriter(self.engine, folder).save(self.engine.version, {})
            return
        save_hf(self.engine, folder)
        if meta.tokenizer is not None and self.mesh.rank == 0:
            meta.tokenizer.save_pretrained(folder)

    def load(self, meta: SaveLoadMeta) -> None:
        """What `save` wrote, at any layout. A sharded checkpoint also sets the version.

        Raises:
          CheckpointError: there is no such checkpoint.
        """
        engine, folder = self.engine, Path(meta.path)
        if meta.weight_format == "dcp":
            state = latest_state(folder)
            if state is None:
                raise CheckpointError(f"{folder} holds no checkpoint")
            load_state(engine, state)
            return
        load_hf(engine.chunks, engine.spec, self.mesh, folder)
        if engine.optimizer is not None:
            # It holds a float32 copy of the weights, which its next step would bring back.
            engine.optimizer.reload_model_params()


def _made(value: T | None, method: str) -> T:
    if value is None:
        raise RuntimeError(f"{method}() comes first")
    return value
