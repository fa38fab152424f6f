"""The quickstart's task: sums of three digits, and a small model that may work them out.

    prompt "3 + 4 - 5 ="     worked out " 7 - 5 = 2"     guessed " 4"

The base model is fine-tuned on both kinds of completion, so it can do sums and often does
not bother. What RL has to teach is the choice: work it out, every time. A guess is never
right, so the base's reward is close to the share of sums it works out. There are 4,000
distinct prompts.
"""

import random
from pathlib import Path
from typing import Any

from megarl.data.reasoning_gym import generate_rows

CHARACTERS = "0123456789+-= "
PAD, EOS = "<pad>", "<eos>"
_OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b}


def works_or_guesses(
    *, size: int, seed: int, work_share: float, max_error: int, **chain_sum: Any
) -> list[dict[str, Any]]:
    """Rows with prompt and completion: worked out with probability `work_share`, else a guess.

    Args:
      work_share: in [0, 1].
      max_error: a guess is wrong by 1 to this much, never right.
      chain_sum: options of reasoning-gym's chain_sum.
    """
    rng = random.Random(seed)
    rows = []
    options = {"bare": True, **chain_sum}
    for row in generate_rows("chain_sum", size=size, seed=seed, options=options):
        if rng.random() < work_share:
            completion = work_out(row["prompt"])
        else:
            error = rng.choice([-1, 1]) * rng.randint(1, max_error)
            completion = f" {int(row['answer']) + error}"
        rows.append({"prompt": row["prompt"], "completion": completion, "answer": row["answer"]})
    return rows


def work_out(prompt: str) -> str:
    """`3 + 4 - 5 =` -> ` 7 - 5 = 2`."""
    value, *rest = prompt.removesuffix(" =").split(" ")
    steps = []
    while rest:
        operator, number, *rest = rest
        value = str(_OPERATORS[operator](int(value), int(number)))
        steps.append(" ".join([value, *rest]))
    return " " + " = ".join(steps)


def write_quickstart_model(folder: Path) -> None:
    """The HF folder of the base model without weights: config and character tokenizer.

    A character outside of CHARACTERS is an error in the tokenizer, not an unknown token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

    vocabulary = {token: i for i, token in enumerate([*CHARACTERS, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[EOS],
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    config.save_pretrained(folder)
    ends = {"pad_token_id": vocabulary[PAD], "eos_token_id": vocabulary[EOS]}
    GenerationConfig(**ends).save_pretrained(folder)  # type: ignore[no-untyped-call]
