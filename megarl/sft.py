"""Supervised fine-tuning on the same actor: prompt and completion pairs, next-token loss."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.actor.checkpoint import Checkpointer
from megarl.actor.engine import MegatronEngine, TokenOutputs
from megarl.actor.micro_batch import Batch
from megarl.actor.policy import shift
from megarl.actor.recover import Recovery
from megarl.actor.scatter import scatter_batch
from megarl.algorithms.losses import sft_loss
from megarl.config.load import load
from megarl.config.run import SFTConfig
from megarl.data.datasets import load_rows
from megarl.data.prompts import PromptStream
from megarl.parallel import Mesh
from megarl.stats.report import RunReporter
from megarl.stats.tracker import StatsTracker
from megarl.train import trainer_rank
from megarl.trajectory import concat_padded


def train(config: SFTConfig, run_dir: Path, mesh: Mesh) -> None:
    """Run every step of `config`. Collective over the world; rank 0 reads the data."""
    stats = StatsTracker()
    prompts = PromptStream(
        load_rows(config.train_dataset, needs=("completion",)),
        batch_size=config.train_dataset.batch_size,
        shuffle=config.train_dataset.shuffle,
        seed=config.seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path or config.actor.path)
    steps = config.total_train_steps or config.total_train_epochs * prompts.steps_per_epoch
    engine = MegatronEngine(config.actor, mesh, total_steps=steps)
    checkpoints = Checkpointer(config, run_dir, engine, prompts.steps_per_epoch)
    recovery = Recovery(config, run_dir, engine, prompts.steps_per_epoch)
    with RunReporter(config, run_dir, enabled=mesh.rank == 0) as report:
        first = recovery.restore(prompts)
        report.start(steps, after=first)
        for step in range(first + 1, steps + 1):
            with stats.record_timing("data"):
                whole = tokenize(next(prompts), tokenizer) if mesh.rank == 0 else None
                batch = scatter_batch(whole, mesh, n_minibatches=1, seed=config.seed)
            with stats.record_timing("train_step"):
                stats.scalar(**sft_step(engine, batch))
                engine.step_lr_scheduler()
            with stats.record_timing("save"):
                checkpoints.after_step(step, last=step == steps)
            report.step(step, stats.export(mesh.cpu_group), {})
            # Last: a run that goes on after this step finds all that the step reported.
            with stats.record_timing("checkpoint_for_recover"):
                recovery.after_step(step, prompts)
        recovery.finish()


def tokenize(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Rows with `prompt` and `completion` -> a padded batch; the end token is learned too."""
    out = []
    for row in rows:
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        completion = tokenizer.encode(row["completion"], add_special_tokens=False)
        completion.append(tokenizer.eos_token_id)
        ids = torch.tensor([prompt + completion], dtype=torch.int32)
        mask = torch.tensor([[0] * len(prompt) + [1] * len(completion)], dtype=torch.int32)
        attention = torch.ones_like(ids, dtype=torch.bool)
        out.append({"input_ids": ids, "attention_mask": attention, "loss_mask": mask})
    return concat_padded(out)


def sft_step(engine: MegatronEngine, batch: Batch) -> dict[str, float]:
    """One optimizer step on the mean negative logprob of the completions' tokens."""
    batch["shifted_mask"] = shift(batch["loss_mask"]).bool()
    num_tokens = int(batch["shifted_mask"].sum())
    return engine.train_batch(
        batch,
        _loss,
        keys=("shifted_mask",),
        num_tokens=num_tokens,
        mask_key="shifted_mask",
        per_token=True,
    )


def _loss(outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    mask = outputs.columns["shifted_mask"]
    result = sft_loss(outputs.logp, mask, num_tokens=outputs.num_tokens)
    return result.loss, result.metrics


def main(arguments: list[str]) -> None:
    """`python -m megarl.sft RUN_DIR`, started once a rank by a launcher."""
    run_dir = Path(arguments[0])
    config = load(run_dir / "config.yaml", [], SFTConfig)
    with trainer_rank(config, config.actor.parallel) as mesh:
        train(config, run_dir, mesh)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1:])
