"""Reads and writes a run: one YAML file and `key=value` overrides, strictly.

What `load` returns has exactly the schema's types; any key that is unknown, missing, or of
another type is a ConfigError with its full dotted name. `load` of what `dump` wrote is an equal
config. `resolve` replaces every None and short form that follows from other keys by its
value; a resolved config resolves to itself.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import yaml

from megarl.config.allocation import AllocationMode
from megarl.config.run import BaseExperimentConfig, GRPOConfig, SFTConfig
from megarl.errors import ConfigError

Config = TypeVar("Config", bound=BaseExperimentConfig)
RunConfig = TypeVar("RunConfig", GRPOConfig, SFTConfig)

_FLOAT_TAG = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, which YAML 1.1 takes for a string; refuses a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that `_Loader` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


@overload
def load(path: Path, overrides: Sequence[str] = ()) -> GRPOConfig: ...
@overload
def load(path: Path, overrides: Sequence[str], cls: type[Config]) -> Config: ...
def load(
    path: Path,
    overrides: Sequence[str] = (),
    cls: type[BaseExperimentConfig] = GRPOConfig,
) -> BaseExperimentConfig:
    """The run in the YAML file `path`, changed by `overrides`.

    Args:
      overrides: `a.b=value`, value in YAML, for any key of the schema whether or not the file
        has it; `+a.b=value` also adds a key to a free mapping such as `train_dataset.options`.

    Raises:
      ConfigError: names the dotted key, or the place in the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping, got {data!r}")
    try:
        data = _unshared(data)
    except RecursionError as error:
        raise ConfigError(f"{path}: an anchor contains itself") from error
    for override in overrides:
        _override(data, cls, override)
    config: BaseExperimentConfig = _build(cls, data, "")
    if isinstance(config, GRPOConfig) and config.allocation_mode is not None:
        _refuse_contradictions(data, config.allocation_mode)
    return config


def _unshared(value: Any) -> Any:
    """`value` with each alias of YAML as a copy of its own, so that an override changes one."""
    if isinstance(value, dict):
        return {key: _unshared(part) for key, part in value.items()}
    return [_unshared(part) for part in value] if isinstance(value, list) else value


def as_dict(config: BaseExperimentConfig) -> dict[str, Any]:
    """`config` as nested plain mappings, lists and numbers."""
    return dataclasses.asdict(config)


def dump(config: BaseExperimentConfig) -> str:
    """`config` as YAML that loads back to an equal config."""
    return yaml.dump(as_dict(config), Dumper=_Dumper, sort_keys=False, default_flow_style=False)


# ---------------------------------------------------------------- resolving


def resolve(config: RunConfig) -> RunConfig:
    """`config` with every value that follows from another key written out.

    `allocation_mode` becomes the keys it stands for (and null itself); the trainer's world,
    tokenizer, evaluation sampling and the rollout pool's sizes get their numbers.

    Raises:
      ConfigError: `allocation_mode` contradicts a key, or the servers leave no trainer rank.
    """
    tokenizer_path = config.tokenizer_path or config.actor.path
    if isinstance(config, SFTConfig):
        actor = replace(config.actor, world_size=config.trainer_world_size)
        return replace(config, tokenizer_path=tokenizer_path, actor=actor)
    if config.allocation_mode is not None:
        config = _expand(config, config.allocation_mode)
    consumer_batch_size = config.rollout.consumer_batch_size or config.train_dataset.batch_size
    # What all admissible versions may start, and the batch after it.
    usable = (config.rollout.max_head_offpolicyness + 2) * consumer_batch_size
    concurrent = config.rollout.max_concurrent_rollouts or consumer_batch_size
    return replace(
        config,
        tokenizer_path=tokenizer_path,
        eval_gconfig=config.eval_gconfig or config.gconfig.new(n_samples=1),
        actor=replace(config.actor, world_size=config.trainer_world_size),
        rollout=replace(
            config.rollout,
            consumer_batch_size=consumer_batch_size,
            max_concurrent_rollouts=concurrent,
            queue_size=config.rollout.queue_size or usable,
        ),
    )


def _expand(config: GRPOConfig, text: str) -> GRPOConfig:
    """`config` with the keys that its allocation mode stands for."""
    mode = AllocationMode.from_str(text)
    for key, value in mode.settings().items():
        section, _, name = key.rpartition(".")
        current = attrgetter(key)(config)
        # A default may be overruled here: `load`, which sees the file, refused explicit ones.
        if current not in (value, _default(type(attrgetter(section)(config)), name)):
            raise _contradiction(key, current, text, value)
    changes = {name: getattr(mode.train, name) for name in ("tp", "pp", "cp", "ep")}
    if mode.train.etp is not None:
        changes["etp"] = mode.train.etp
    try:
        parallel = replace(config.actor.parallel, **changes)
    except ConfigError as error:
        raise ConfigError(f"actor.parallel.{error}") from None
    return replace(
        config,
        allocation_mode=None,
        actor=replace(config.actor, parallel=parallel, world_size=mode.train_world_size),
        ref=None if config.ref is None else replace(config.ref, parallel=parallel),
        rollout=replace(config.rollout, backend=mode.backend, parallel=mode.gen),
    )


def _default(section: type, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(section) if f.name == name)


def _refuse_contradictions(data: dict[str, Any], text: str) -> None:
    """ConfigError if a key that stands in the file says other than the allocation mode."""
    for key, value in AllocationMode.from_str(text).settings().items():
        keys = [key, key.replace("actor.", "ref.", 1)] if ".parallel." in key else [key]
        for explicit_key in keys:
            explicit: Any = data
            for name in explicit_key.split("."):
                explicit = explicit.get(name) if isinstance(explicit, dict) else None
            if explicit is not None and explicit != value:
                raise _contradiction(explicit_key, explicit, text, value)


def _contradiction(key: str, current: Any, text: str, value: Any) -> ConfigError:
    return ConfigError(f"{key}: {current} contradicts allocation_mode {text!r}, which says {value}")


# ---------------------------------------------------------------- overrides


def _override(data: dict[str, Any], cls: type, override: str) -> None:
    """Write one `key=value` into `data`, checking the key against the schema."""
    key, equals, text = override.partition("=")
    adding, key = key.startswith("+"), key.removeprefix("+")
    if not equals or not key:
        raise ConfigError(f"{override!r}: expected key=value")
    *sections, last = path = key.split(".")
    hint: Any = cls
    node = data
    for depth, name in enumerate(path):
        where = ".".join(path[: depth + 1])
        section = _section(hint)
        if section is not None:
            hint = _child(section, name, where)
        elif _is_free(hint):
            if name not in node and not adding:
                raise ConfigError(f"{where}: no such key; +{where}=... adds it")
            hint = Any
        else:
            parent = ".".join(path[:depth])
            raise ConfigError(f"{where}: {parent} is {_type_name(hint)} and has no keys")
        if depth < len(sections):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                raise ConfigError(f"{where}: expected a mapping, got {node!r}")
    node[last] = _value(text, hint, key)


def _value(text: str, hint: Any, where: str) -> Any:
    """`text` as YAML; where a string is wanted, `7` and `yes` are the strings they look like."""
    wants_str = str in _alternatives(hint)
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        if wants_str:
            return text
        raise ConfigError(f"{where}: {text!r} is not YAML") from error
    return text if wants_str and not isinstance(value, str | None) else value


# ---------------------------------------------------------------- building


def _build(cls: type, data: Any, where: str) -> Any:
    """`data` as a `cls`; `where` is the dotted key of `data`, empty at the top."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping, got {data!r}")
    prefix = f"{where}." if where else ""
    hints = {key: _child(cls, key, f"{prefix}{key}") for key in data}
    for spec in dataclasses.fields(cls):
        required = spec.default is spec.default_factory is dataclasses.MISSING
        if required and spec.name not in data:
            raise ConfigError(f"{prefix}{spec.name}: required")
    values = {key: _coerce(hints[key], value, f"{prefix}{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except ConfigError as error:  # from __post_init__, which knows only its own section
        raise ConfigError(f"{prefix}{error}") from None


def _child(cls: type, name: Any, where: str) -> Any:
    """The type of field `name` of `cls`. ConfigError if there is none."""
    hints = typing.get_type_hints(cls)
    if name in hints:
        return hints[name]
    close = difflib.get_close_matches(str(name), hints, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(hints)}"
    raise ConfigError(f"{where}: no such option; {hint}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type that is none is its own only member."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _section(hint: Any) -> type | None:
    """The config class in `hint`, if it has one."""
    for member in _alternatives(hint):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def _is_free(hint: Any) -> bool:
    """Whether `hint` takes a mapping with keys that no class names."""
    return any(t is Any or typing.get_origin(t) is dict for t in _alternatives(hint))


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value`, read from YAML, as the type `hint`. The only conversion is int to float."""
    wanted = hint
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in _alternatives(hint):
            return None
        members = [t for t in _alternatives(hint) if t is not types.NoneType]
        assert len(members) == 1, f"{where}: the schema has a union of {hint}"
        wanted = members[0]
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return value
    if dataclasses.is_dataclass(wanted):
        assert isinstance(wanted, type)
        return _build(wanted, value, where)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(repr, arguments))
            raise ConfigError(f"{where}: must be one of {choices}, got {value!r}")
        return value
    if origin is list and isinstance(value, list):
        return [_coerce(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: keys must be strings, got {key!r}")
        return {key: _coerce(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if wanted is float and type(value) is int:
        return float(value)
    if origin is not None or type(value) is not wanted:
        quote = "; quote it to make it a string" if wanted is str and value is not None else ""
        raise ConfigError(f"{where}: expected {_type_name(hint)}, got {value!r}{quote}")
    return value
