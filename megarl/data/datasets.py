"""Rows of a dataset section: generated, from a file, or from the hub.

A row is a dict with `prompt` (text) or `messages` (chat), what its reward reads (`answer`), and
for fine-tuning `completion`. Every row has a `row_id`, its place in the dataset.
"""

import importlib
from pathlib import Path
from typing import Any

from megarl.config.run import DatasetConfig
from megarl.data.reasoning_gym import generate_rows
from megarl.errors import ConfigError

Row = dict[str, Any]

_FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(config: DatasetConfig, section: str = "train_dataset") -> list[Row]:
    """All rows of `config`, without those whose prompt also stands in `config.exclude`.

    Raises:
      ConfigError: the dataset is not there, or its rows have no prompt.
    """
    try:
        rows = _read(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{section}.path: {config.path}: {error}") from error
    if config.size is not None:
        rows = rows[: config.size]
    for i, row in enumerate(rows):
        if "prompt" not in row and "messages" not in row:
            raise ConfigError(
                f"{section}.path: row {i} of {config.path} has neither prompt nor messages; "
                f"it has {', '.join(row)}"
            )
        row.setdefault("row_id", i)
    if config.exclude is not None:
        left_out = {_key(row) for row in load_rows(config.exclude, f"{section}.exclude")}
        rows = [row for row in rows if _key(row) not in left_out]
    if not rows:
        raise ConfigError(f"{section}.path: {config.path} has no rows")
    return rows


def _key(row: Row) -> str:
    return str(row["messages"] if "messages" in row else row["prompt"])


def _read(config: DatasetConfig) -> list[Row]:
    kind, _, name = config.path.partition(":")
    options = config.options
    if kind == "reasoning_gym":
        assert config.size is not None, "DatasetConfig requires it"
        return generate_rows(name, size=config.size, seed=config.seed, options=options)
    if kind == "python":
        # `python:package.module:function` is a generator of the user's own.
        module, _, function = name.partition(":")
        made = getattr(importlib.import_module(module), function)
        rows: list[Row] = made(size=config.size, seed=config.seed, **options)
        return rows
    import datasets

    file_format = _FILE_FORMATS.get(Path(config.path).suffix)
    if file_format is not None:
        loaded = datasets.load_dataset(
            file_format, data_files=config.path, split="train", **options
        )
    else:
        loaded = datasets.load_dataset(config.path, split=config.split, **options)
    return [dict(row) for row in loaded]
