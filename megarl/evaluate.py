"""Held-out reward of a checkpoint: one process, the servers' only client."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from megarl.config.load import load
from megarl.config.run import GRPOConfig
from megarl.rollout_head import RolloutHead
from megarl.stats.eval_file import (
    comparison_table,
    free_name,
    read_evaluation,
    table,
    write_evaluation,
)
from megarl.stats.evaluation import compare


def main(arguments: list[str]) -> None:
    """`python -m megarl.evaluate RUN_DIR [--compare FILE]`, started beside the servers."""
    parser = argparse.ArgumentParser(prog="megarl.evaluate")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--compare", type=Path)
    args = parser.parse_args(arguments)
    config: GRPOConfig = load(args.run_dir / "config.yaml", [])
    # The servers are this evaluation's own; those that `servers` names are the training run's.
    config = replace(config, rollout=replace(config.rollout, servers=None))
    assert config.valid_dataset is not None, "the launcher checked it"
    # Read first: the file written here may have its name.
    before = read_evaluation(args.compare, config.valid_dataset) if args.compare else None
    addresses = [f"http://{a}" for a in os.environ["MEGARL_SERVER_ADDRS"].split(",")]
    head = RolloutHead(config, addresses, args.run_dir)
    try:
        head.start()
        result = head.evaluate()
    finally:
        head.close()
    checkpoint = Path(config.actor.path)
    path = free_name(args.run_dir, checkpoint)
    write_evaluation(path, result, dataset=config.valid_dataset, checkpoint=checkpoint)
    print(table(result))
    if before is not None:
        print(comparison_table(*compare(before, result), str(args.compare)))
    print(f"every prompt's rewards: {path}")
    print(
        f"eval reward {result.reward:.4f} over {result.num_episodes} episodes, "
        f"{result.response_tokens:.1f} tokens a response"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
