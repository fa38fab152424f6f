"""One response of a fleet, whatever becomes of its parts."""

import asyncio
import time

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelRequest, ModelResponse
from megarl.rollout.fleet import Fleet

_SEEDS = 1 << 31
_SEED_STRIDE = 1_000_003


async def respond(
    req: ModelRequest,
    fleet: Fleet,
    generating: asyncio.Event,
    max_tokens_per_request: int | None,
) -> ModelResponse:
    """One response, through any number of interruptions.

    It is asked for in parts of at most `max_tokens_per_request`; what a pause ended is asked for
    again when generation is resumed, and what a server owed that is lost, of another one. Tokens
    so far are the next part's prompt; each keeps the logprob and version it was sampled with.

    Args:
      generating: is clear while all servers are paused.
      max_tokens_per_request: None is no limit.

    Raises:
      ValueError: the prompt leaves no room for a token.
      EngineError: the server failed, or stayed silent.
    """
    gconfig = req.gconfig
    budget = min(gconfig.max_new_tokens, gconfig.max_tokens - len(req.input_ids))
    if budget < 1:
        raise ValueError(
            f"request {req.rid}: a prompt of {len(req.input_ids)} tokens leaves no room in "
            f"max_tokens {gconfig.max_tokens}"
        )
    out = ModelResponse(input_tokens=list(req.input_ids), stop_reason="abort")
    started = time.monotonic()
    most = _most_tokens(gconfig, budget, max_tokens_per_request)
    while out.stop_reason == "abort":
        await generating.wait()
        done = out.output_len
        wanted = min(most, budget - done)
        part = ModelRequest(
            rid=req.rid, input_ids=out.input_tokens + out.output_tokens, gconfig=gconfig
        )
        chunk = await fleet.generate(part, _rest(gconfig, done), wanted)
        if not done:
            out.ttft_s = time.monotonic() - started
        out.output_tokens += chunk.tokens
        out.output_logprobs += chunk.logprobs
        out.output_versions += chunk.versions
        out.stop_reason = chunk.stop_reason  # type: ignore[assignment]
        if out.stop_reason == "length" and len(chunk.tokens) == wanted:
            out.stop_reason = "abort"  # of this part only
        if out.stop_reason == "abort" and out.output_len >= budget:
            out.stop_reason = "length"
    out.latency_s = time.monotonic() - started
    return out


def _most_tokens(gconfig: GenerationHyperparameters, budget: int, limit: int | None) -> int:
    """Of one part. A server that sees a part looks for no stop string that began before it, and
    counts no repetitions."""
    is_one_piece = bool(gconfig.stop) or gconfig.frequency_penalty != 0
    return budget if is_one_piece or limit is None else limit


def _rest(gconfig: GenerationHyperparameters, done: int) -> GenerationHyperparameters:
    """For what follows the first `done` tokens."""
    if not done:
        return gconfig
    # The same seed would draw the same numbers again.
    seed = None if gconfig.seed is None else (gconfig.seed + done * _SEED_STRIDE) % _SEEDS
    return gconfig.new(min_new_tokens=max(0, gconfig.min_new_tokens - done), seed=seed)
