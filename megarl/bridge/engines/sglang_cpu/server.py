"""Runs SGLang's own HTTP server where there is no GPU and no build of its kernels.

    .venv-sglang/bin/python PATH/TO/server.py --device cpu --model-path ... --port ...

It is given as a path, not as a module: then this folder, with `sgl_kernel` in it, comes first on
the Python path, also in the scheduler and detokenizer processes, which import this file again.
What stands above `__main__` is for SGLang 0.5.23; on a GPU none of it is needed.
"""

import os
import sys

import torch

# "operator torchvision::nms does not exist": torchvision's wheel is built for CUDA, so beside a
# CPU torch its ops never load, and its Python, which transformers imports, registers fakes for
# them. No language model calls them.
for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )


def main(arguments: list[str]) -> None:
    """What `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
