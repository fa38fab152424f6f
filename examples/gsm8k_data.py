"""What the examples train on: GSM8K's file, or whatever else the config names.

Rewards run in processes of their own that import this module, so it imports nothing slow.
"""

import json
import re

from megarl.data.datasets import load_rows


def get_dataset(section, tokenizer, rank=0, world_size=1):
    """The rows of a dataset section that belong to data-parallel rank `rank`.

    A .jsonl file is GSM8K's: `question`, and `answer` that ends in `#### 72`.
    """
    if section.path.endswith(".jsonl"):
        with open(section.path, encoding="utf-8") as file:
            rows = [process(json.loads(line), tokenizer) for line in file]
        rows = rows[: section.size]
    else:
        rows = load_rows(section)
    return rows[rank::world_size]


def process(sample, tokenizer):
    """A line of GSM8K as a row: a chat where the model knows how to chat, else text."""
    if tokenizer.chat_template:
        asked = {"messages": [{"role": "user", "content": sample["question"]}]}
    else:
        asked = {"prompt": f"Question: {sample['question']}\nAnswer:"}
    return {**asked, "answer": sample["answer"].rpartition("####")[2].strip()}


def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    """1.0 if the last number of the completion is the answer, else 0.0."""
    wanted, found = (
        re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in (answer, completions)
    )
    return float(bool(found) and bool(wanted) and float(found[-1]) == float(wanted[-1]))
