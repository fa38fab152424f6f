"""What vLLM's own loader takes, at any tp and dp, without one server: a script for a process of
its own.

    python traced_vllm.py FOLDER < cases.json > parts.json

FOLDER holds a config.json. A case is [tp, dp, expert_parallel, rank]; the answer to each is the
parts of each HF tensor that the worker's loader reads, see megarl/bridge/engines/trace.py. The
process takes the place of one rank of a world whose other ranks are not there: torch's fake
process group completes every collective at once.
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform

from megarl.bridge.engines.trace import needed_parts
from megarl.model.families import hf_shapes, stored_dtype


def alone():
    """Keep vLLM from talking to ranks that are not there."""
    new_group, make_group = dist.new_group, parallel_state.init_model_parallel_group
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
    parallel_state.init_model_parallel_group = lambda *args, **kwargs: make_group(
        *args, **{**kwargs, "use_message_queue_broadcaster": False}
    )
    parallel_state.in_the_same_node_as = lambda group, *args: [True] * dist.get_world_size(group)
    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: base)
    # It is read while the model is made, which is on the meta device.
    make_map = expert_map_manager.determine_expert_map

    def determine_expert_map(*args, **kwargs):
        with torch.device("cpu"):
            return make_map(*args, **kwargs)

    expert_map_manager.determine_expert_map = determine_expert_map


@contextlib.contextmanager
def place_of(folder, tp, dp, expert_parallel, rank):
    """vLLM's config, while this process is the worker `rank` of tp * dp."""
    made = EngineArgs(
        model=folder,
        dtype="bfloat16",
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=expert_parallel,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
    ).create_engine_config()
    made.parallel_config.data_parallel_rank = rank // tp
    made.parallel_config.data_parallel_index = rank // tp
    dist.init_process_group("fake", rank=rank, world_size=tp * dp, store=FakeStore())
    try:
        with set_current_vllm_config(made):
            parallel_state.init_distributed_environment(
                tp, rank % tp, distributed_init_method="env://", local_rank=0, backend="fake"
            )
            parallel_state.initialize_model_parallel(tp, 1)
            yield made
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def parts(folder, case):
    with open(os.path.join(folder, "config.json")) as file:
        shapes = hf_shapes(json.load(file))
    tensors = [
        (name, list(shape), stored_dtype(name, "bfloat16")) for name, shape in shapes.items()
    ]
    with place_of(folder, *case) as config:
        with torch.device("meta"):
            model = initialize_model(vllm_config=config)
        with disable_mtp_completeness_check():
            return needed_parts(model.load_weights, tensors)


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    alone()
    json.dump([parts(sys.argv[1], case) for case in json.load(sys.stdin)], output)
    output.close()
