"""megarl: asynchronous reinforcement learning for large language models."""

import warnings

__version__ = "0.1.0"

# Hides what each rank would print while it imports Megatron-Core 0.16.1, of what this machine
# is known to lack or nobody here can change. Here because the import comes before any call.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "When using sequence parallelism it is recommended",
    # Megatron's optimizer looks at .grad of every slice of its parameters.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # torch 2.13 renames what Megatron calls by the old names.
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    r"`load_state_dict` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
):
    warnings.filterwarnings("ignore", message=_message)
