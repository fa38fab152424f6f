"""An output layer that leaves its product to the loss.

With one, GPTModel gives the hidden states [1, T, H] in place of the logits [1, T, V/tp]; with
sequence parallelism this rank's [1, T/tp, H]. The layer stays where it was with the weight that
it has, so parameters, names, export and checkpoints are those of any other model.
"""

import contextlib
from collections.abc import Iterator

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


class HiddenOutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """Hands its input on, except where `multiplies` is set."""

    multiplies = False

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] -> the same, or the logits [T, 1, V/tp], and no bias."""
        if self.multiplies:
            result: tuple[Tensor, Tensor | None] = super().forward(
                input_, weight, runtime_gather_output
            )
            return result
        return input_, None


def give_hidden_states(model: GPTModel) -> None:
    """Make `model`, which must have an output layer, give hidden states from now on."""
    layer = model.output_layer
    if type(layer) is not ColumnParallelLinear:
        raise ValueError(f"expected an output layer ColumnParallelLinear, got {type(layer)}")
    layer.__class__ = HiddenOutputLayer


def output_weight(model: GPTModel) -> Tensor:
    """[V/tp, H], the output layer's own or the embedding's."""
    # For an untied model of one stage Megatron's shared_embedding_or_output_weight() is the
    # embedding's all the same.
    shared = model.share_embeddings_and_output_weights
    weight: Tensor = (
        model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
    )
    return weight


@contextlib.contextmanager
def giving_logits(model: GPTModel) -> Iterator[None]:
    """Let `model` give logits here, whether or not it was made to give hidden states."""
    layer = model.output_layer
    if not isinstance(layer, HiddenOutputLayer):
        yield
        return
    layer.multiplies = True
    try:
        yield
    finally:
        layer.multiplies = False
