"""`megarl plan`: what a push of weights costs in the layout of a config, on paper."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.bridge.forecast import Forecast, Load, forecast
from megarl.config.run import GRPOConfig
from megarl.errors import ConfigError

_ITEMSIZES = {"bfloat16": 2, "float32": 4}


def plan(config: GRPOConfig, *, link_gbit_s: float, as_json: bool) -> int:
    """Print the forecast; 0.

    Args:
      config: resolved. Only `config.json` of `actor.path` is read.
      link_gbit_s: of each rank's network link, in each direction.

    Raises:
      ConfigError: there is no config.json, or the model does not divide.
    """
    if link_gbit_s <= 0:
        raise ConfigError(f"--link: must be > 0 Gbit/s, got {link_gbit_s}")
    path = Path(config.actor.path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"actor.path: {path} does not exist")
    try:
        made = forecast(
            json.loads(path.read_text(encoding="utf-8")),
            config.actor.parallel,
            config.trainer_world_size,
            config.rollout.parallel,
            itemsize=_ITEMSIZES[config.actor.dtype],
            bucket_bytes=config.weight_update.bucket_bytes,
        )
    except ValueError as error:
        raise ConfigError(f"actor.parallel: {error}") from error
    seconds = {
        "sharded_s": made.sharded_s(link_gbit_s * 1e9 / 8),
        "broadcast_s": made.broadcast_s(link_gbit_s * 1e9 / 8),
    }
    if as_json:
        print(json.dumps({**asdict(made), "link_gbit_s": link_gbit_s, **seconds}, indent=2))
    else:
        print(table(made, link_gbit_s, seconds))
    return 0


def table(made: Forecast, link_gbit_s: float, seconds: dict[str, float]) -> str:
    """The forecast for people."""
    loads: list[tuple[str, Load]] = [
        ("out of a trainer rank", made.out_of_trainer),
        ("into a worker", made.into_worker),
        ("  of it from the trainer", made.into_worker_from_trainer),
        ("passed on by a worker", made.passed_on_by_worker),
    ]
    lines = [
        f"{_count(made.parameters)} parameters, {_bytes(made.model_bytes)}, from "
        f"{made.trainer_ranks} trainer ranks to {made.workers} workers",
        "",
        f"{'bytes a push':<28}{'least':>12}{'mean':>12}{'most':>12}",
    ]
    for name, load in loads:
        numbers = (load.least, load.mean, load.most)
        lines.append(f"{name:<28}" + "".join(f"{_bytes(x):>12}" for x in numbers))
    lines += [
        f"{'optimum into a worker':<28}{'':>12}{_bytes(made.optimal_into_worker):>12}",
        "",
        f"{made.transfers:,} transfers in {made.rounds} rounds; buffers of "
        f"{_bytes(made.buffer_bytes)} a rank",
        f"at {link_gbit_s:g} Gbit/s a rank, each way: sharded {seconds['sharded_s']:.3g} s, "
        f"gathered broadcast {seconds['broadcast_s']:.3g} s (bytes alone)",
    ]
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _count(parameters: Any) -> str:
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters:,}"
