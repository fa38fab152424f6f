"""Rows of a dataset section: generated, from a file, or from the hub.

A row is a dict with `prompt` (text) or `messages` (chat), what its reward reads (`answer`), and
for fine-tuning `completion`. Every row has a `row_id`: its own, or its place in the dataset
before anything was excluded, so that it names the same row in every run.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

from megarl.config.run import DatasetConfig
from megarl.data.reasoning_gym import generate_rows
from megarl.errors import ConfigError

Row = dict[str, Any]

_FILE_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(
    config: DatasetConfig, section: str = "train_dataset", *, needs: tuple[str, ...] = ()
) -> list[Row]:
    """All rows of `config`, without those whose prompt also stands in `config.exclude`.

    Args:
      section: where `config` stands in the run, for messages.
      needs: keys every row must have beside its prompt.

    Raises:
      ConfigError: the dataset is not there, has no rows, or a row lacks a key.
    """
    rows = _read(config, section)
    if config.size is not None:
        rows = rows[: config.size]
    for i, row in enumerate(rows):
        missing = [key for key in needs if key not in row]
        if "prompt" not in row and "messages" not in row:
            missing = ["prompt or messages", *missing]
        if missing:
            raise ConfigError(
                f"{section}.path: row {i} of {config.path} lacks {', '.join(missing)}; it has "
                f"{', '.join(row)}"
            )
        if row.get("row_id") is None:  # a column may have it for some rows only
            row["row_id"] = i
    if config.exclude is not None:
        left_out = {_prompt_of(row) for row in load_rows(config.exclude, f"{section}.exclude")}
        rows = [row for row in rows if _prompt_of(row) not in left_out]
    if not rows:
        raise ConfigError(f"{section}.path: {config.path} has no rows")
    return rows


def _prompt_of(row: Row) -> str:
    return str(row["messages"] if "messages" in row else row["prompt"])


def _read(config: DatasetConfig, section: str) -> list[Row]:
    kind, colon, name = config.path.partition(":")
    if colon and kind == "reasoning_gym":
        assert config.size is not None, "DatasetConfig requires it"
        try:
            return generate_rows(name, size=config.size, seed=config.seed, options=config.options)
        except ValueError as error:
            raise ConfigError(f"{section}: {error}") from error
    if colon and kind == "python":
        return _call_generator(config, name, section)
    return _load_files(config, section)


def _call_generator(config: DatasetConfig, target: str, section: str) -> list[Row]:
    """Rows of `package.module:function`, called with size, seed and the options."""
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{section}.path: {config.path}: {error}") from error
    arguments = {"size": config.size, "seed": config.seed, **config.options}
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{section}.options: {config.path}: {error}") from error
    rows: list[Row] = function(**arguments)
    return rows


def _load_files(config: DatasetConfig, section: str) -> list[Row]:
    """Rows through `datasets`: a local file by its suffix, anything else by its hub name.

    Options are those of `datasets.load_dataset`, and two of our own: `columns`, see `_renamed`,
    and `instruction`, which ends each question.
    """
    import datasets  # two seconds, and generated datasets do without

    options = dict(config.options)
    columns, instruction = options.pop("columns", {}), options.pop("instruction", "")
    path = Path(config.path)
    file_format = _FILE_FORMATS.get(path.suffix)
    if file_format is not None and path.is_file() and path.stat().st_size == 0:
        return []  # datasets 4 answers an empty file with a bare StopIteration
    try:
        if file_format is not None:
            loaded = datasets.load_dataset(
                file_format, data_files=config.path, split="train", **options
            )
        else:
            loaded = datasets.load_dataset(config.path, split=config.split, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = error.__cause__ or error  # a bad line of a file is in the cause only
        raise ConfigError(f"{section}.path: {config.path}: {reason}") from error
    return [_renamed(dict(row), columns, instruction, section) for row in loaded]


def _renamed(row: Row, columns: dict[str, str], instruction: str, section: str) -> Row:
    """`row` with its columns under the names that are read here, as messages where asked.

    Args:
      columns: {"messages": "question", "answer": "solution"}: ours, and the file's. A text for
        `messages` becomes one message of a user. Columns that are not named keep their names.
      instruction: added to the prompt, or to a text that becomes messages.
    """
    for name, column in columns.items():
        if column not in row:
            raise ConfigError(
                f"{section}.options.columns.{name}: no column {column!r}; a row has "
                f"{', '.join(row)}"
            )
    renamed = {name: row[column] for name, column in columns.items()}
    row = {key: x for key, x in row.items() if key not in columns.values()} | renamed
    for name in ("prompt", "messages"):
        if isinstance(row.get(name), str):
            row[name] += instruction
    if isinstance(row.get("messages"), str):
        row["messages"] = [{"role": "user", "content": row["messages"]}]
    return row
