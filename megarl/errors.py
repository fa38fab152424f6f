"""Every exception of megarl, one tree.

MegarlError
  ConfigError         the run as written cannot start; one line, names the dotted key
  EngineError         an inference server answered wrongly, late or not at all
    EngineTimeout     ... it was awaited longer than its limit
  WeightUpdateError   new weights did not reach a server
  NonFiniteError      a loss or gradient is nan or inf; raised before the optimizer steps
  CheckpointError     a checkpoint is missing, partial, or of another model
  LaunchError         a process of the run could not be started, or ended early
"""


class MegarlError(Exception):
    """Root of the tree; catch it to catch everything megarl raises on purpose."""


class ConfigError(MegarlError):
    """The run as written cannot start."""


class EngineError(MegarlError):
    """An inference server answered wrongly, late or not at all."""


class EngineTimeout(EngineError):
    """An inference server was awaited longer than its limit."""


class WeightUpdateError(MegarlError):
    """New weights did not reach a server."""


class NonFiniteError(MegarlError):
    """A loss or gradient is nan or inf."""


class CheckpointError(MegarlError):
    """A checkpoint is missing, partial, or of another model."""


class LaunchError(MegarlError):
    """A process of the run could not be started, or ended early."""
