"""What a section asks of its own values: ConfigErrors without the section's name."""

from typing import Any

from megarl.errors import ConfigError


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def at_least(section: Any, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= minimum, f"{name}: must be >= {minimum}, got {value}")


def above_zero(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        require(value is None or value > 0, f"{name}: must be > 0, got {value}")
