"""Why episodes came to nothing: counted by reason, and whether any succeed at all."""

import logging
from collections import Counter

from megarl.errors import EngineError

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 32
"""Training episodes that may fail one after another, with no success, before the run is given up;
or as many as run at one time, if these are more: a moment's trouble may end them all."""


class Failures:
    """Of one pool.

    Args:
      num_at_once: episodes that run at one time.
    """

    def __init__(self, num_at_once: int) -> None:
        self.reasons: Counter[str] = Counter()
        self._limit = max(MAX_CONSECUTIVE_FAILURES, num_at_once)
        self._in_a_row = 0
        self._nothing_succeeds: EngineError | None = None

    def on_error(self, error: Exception, *, is_eval: bool) -> None:
        """An episode raised. Those of an evaluation are only counted."""
        while isinstance(error, ExceptionGroup):  # a task group's: the cause is inside
            error = error.exceptions[0]
        kind = type(error).__name__
        self.reasons[kind] += 1
        if self.reasons[kind] == 1:
            logger.warning("episode rejected: %s: %s", kind, error, exc_info=error)
        if is_eval:
            return
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            text = f"the last {self._in_a_row} episodes all failed, the last with {kind}: {error}"
            self._nothing_succeeds = EngineError(text)
            self._nothing_succeeds.__cause__ = error

    def on_success(self) -> None:
        """A training episode ended well."""
        self._in_a_row, self._nothing_succeeds = 0, None

    def take_error(self) -> EngineError | None:
        """Once, if episodes do nothing but fail."""
        error = self._nothing_succeeds
        if error is not None:
            self.on_success()
        return error
