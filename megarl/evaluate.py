"""Held-out reward of a checkpoint: one process, the servers' only client."""

import os
import sys
from pathlib import Path

from megarl.config.load import load
from megarl.rollout_head import RolloutHead


def main(arguments: list[str]) -> None:
    """`python -m megarl.evaluate RUN_DIR`, started by a launcher beside the servers."""
    run_dir = Path(arguments[0])
    config = load(run_dir / "config.yaml", [])
    addresses = [f"http://{a}" for a in os.environ["MEGARL_SERVER_ADDRS"].split(",")]
    head = RolloutHead(config, addresses, run_dir)
    try:
        head.start()
        result = head.evaluate()
    finally:
        head.close()
    print(
        f"eval reward {result.reward:.4f} over {result.num_episodes} episodes, "
        f"{result.response_tokens:.1f} tokens a response"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
