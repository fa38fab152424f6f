"""What rank 0 holds of the rollout side: prompts, pool, workflows, rewards, sender.

No Megatron here: `megarl eval` uses it without a trainer.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megarl.config.run import GRPOConfig
from megarl.data.datasets import load_rows
from megarl.data.prompts import PromptStream
from megarl.rollout import restarts
from megarl.rollout.api import RolloutWorkflow
from megarl.rollout.backends import make_client
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.reward_worker import load_function
from megarl.rollout.workflows import load_workflow
from megarl.rollout.workflows.reward_fn import make_reward
from megarl.stats.evaluation import Evaluation, PromptScores
from megarl.trajectory import Trajectory


class RolloutHead:
    """What rank 0 holds: the engine, the prompts, the workflows, the rewards' processes."""

    def __init__(self, config: GRPOConfig, addresses: list[str], run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        rows = load_rows(config.train_dataset)
        self.prompts = PromptStream(
            rows,
            batch_size=config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            seed=config.seed,
        )
        valid = config.valid_dataset
        self.eval_rows = load_rows(valid, "valid_dataset") if valid is not None else []
        self.tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
        self.rewards = make_reward(config.reward)
        clients = [
            make_client(
                config.rollout.backend,
                address,
                request_timeout_s=config.rollout.request_timeout_s,
                retries=config.rollout.request_retries,
            )
            for address in addresses
        ]
        self.engine = RemoteInferenceEngine(
            config.rollout,
            clients,
            batch_size=config.train_dataset.batch_size,
            dump_dir=run_dir if config.rollout.dump_to_file else None,
            comeback_s=restarts.comeback_s(config.rollout.setup_timeout_s),
            on_lost=restarts.ask_for_restart,
        )
        self.workflow = self._workflow(config.gconfig)
        accept = config.rollout.should_accept_fn
        self.should_accept = load_function(accept) if accept else None
        self.eval_gconfig = config.eval_gconfig or config.gconfig.new(n_samples=1)
        self.eval_workflow = self._workflow(self.eval_gconfig)
        self._counts_before: dict[str, float] = {}

    def _workflow(self, gconfig: Any) -> RolloutWorkflow:
        # A server stops at its own model's end token; the run's tokenizer has a say as well.
        stop, eos = list(gconfig.stop_token_ids), self.tokenizer.eos_token_id
        if eos is not None and eos not in stop and not gconfig.ignore_eos:
            stop.append(eos)
        given = {
            "reward_fn": self.rewards,
            "gconfig": replace(gconfig, stop_token_ids=stop),
            "tokenizer": self.tokenizer,
        }
        return load_workflow(
            self.config.rollout.workflow, given, self.config.rollout.workflow_options
        )

    def start(self) -> None:
        """Wait for every server, then run the pool's loop."""
        self.engine.initialize()
        # The servers hold no weights of ours: the first push lets episodes start.
        self.engine.pause()
        limit = self.config.rollout.setup_timeout_s
        self.engine.run(self.engine.fleet.wait_healthy(limit), timeout_s=limit + 60)
        self.engine.start_health_watch()

    def evaluate(self) -> Evaluation:
        """The held-out rows under the servers' present weights. EngineError if all failed."""
        episodes = self.engine.run(
            self.engine.executor.run_each(self.eval_rows, self.eval_workflow, is_eval=True), None
        )
        return Evaluation(
            prompts=[
                _scores(row["row_id"], episode)
                for row, episode in zip(self.eval_rows, episodes, strict=True)
            ],
            n_samples=self.eval_gconfig.n_samples,
            success_threshold=self.config.evaluator.success_threshold,
        )

    def export_stats(self) -> dict[str, float]:
        """Counts of the run: the pool's, the reward's, and the workflow's if it has any."""
        return self.engine.export_stats() | self._counts()

    def _counts(self) -> dict[str, float]:
        """Those that belong to this process, after those of the processes before."""
        of_workflow: dict[str, float] = getattr(self.workflow, "export_stats", dict)()
        now = self.rewards.export_stats() | of_workflow
        names = dict.fromkeys([*self._counts_before, *now])
        return {name: self._counts_before.get(name, 0.0) + now.get(name, 0.0) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs of this; plain values and tensors."""
        return self.engine.state_dict() | {"counts": self._counts()}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Go on after the step that made `version`. Before the first episode."""
        self._counts_before = dict(state.get("counts", {}))
        self.engine.load_state_dict(state, version, self.workflow, self.should_accept)

    def close(self) -> None:
        try:
            # Before the reward processes: an episode would take their end for a crash.
            self.engine.cancel_episodes()
            self.engine.run(self.rewards.close(), timeout_s=60.0)
        finally:
            self.engine.destroy()


def _scores(row_id: Any, episode: Trajectory | None) -> PromptScores:
    """A reward that is no number is none."""
    if episode is None:
        return PromptScores(row_id, [], [], [])
    tokens, cut = episode["loss_mask"].sum(1).tolist(), episode.get("no_eos")
    no_eos = [False] * len(tokens) if cut is None else cut.tolist()
    samples = zip(episode["rewards"].tolist(), tokens, no_eos, strict=True)
    scored = [sample for sample in samples if math.isfinite(sample[0])]
    return PromptScores(row_id, *([sample[i] for sample in scored] for i in range(3)))
