"""From a request, whichever door it came through, to completions that are recorded."""

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import ModelRequest, ModelResponse
from megarl.rollout.proxy.errors import ProxyError, bad_request
from megarl.rollout.proxy.fields import Fields
from megarl.rollout.proxy.messages import Message, Setting
from megarl.rollout.proxy.session import Completion, Session
from megarl.rollout.proxy.tool_calls import split_tool_calls

logger = logging.getLogger(__name__)

MAX_STOPS = 16
MAX_SEED = 1 << 62


@dataclass(frozen=True)
class Ask:
    """What a client asks for."""

    messages: list[Message]
    setting: Setting
    gconfig: GenerationHyperparameters
    num_choices: int = 1
    seed: int | None = None
    """Of the first choice; choice i has seed + i. None is the session's next ones."""
    stream: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """What only the door reads, such as whether to write logprobs."""


def read_sampling(
    session: Session, body: Fields, max_tokens: int | None
) -> GenerationHyperparameters:
    """The run's sampling with what the request may change.

    `stop` adds to the run's stops, max_tokens is cut at the run's. The rest belongs to the run:
    the trainer computes probabilities at its temperature, so tokens of another one would have a
    wrong importance ratio. A request that asks for another is refused, and not served at the
    run's in silence. Sessions with `may_change_sampling` take any.

    Raises:
      ProxyError: 400.
    """
    run = session.gconfig
    changes: dict[str, Any] = {"n_samples": 1}
    asked = {
        "temperature": body.number("temperature", 0.0, 2.0),
        "top_p": body.number("top_p", 0.0, 1.0),
        "top_k": body.integer("top_k", -1, 1 << 31),
        "frequency_penalty": body.number("frequency_penalty", -2.0, 2.0),
    }
    if asked["top_p"] == 0:
        raise bad_request("top_p", "must be above 0")
    if asked["top_k"] in (-1, 0):  # all of them, as servers write it
        asked["top_k"] = GenerationHyperparameters().top_k
    for name, value in asked.items():
        of_run = 0.0 if name == "temperature" and run.greedy else getattr(run, name)
        if value is None or value == of_run:
            continue
        if not session.may_change_sampling:
            raise bad_request(
                name, f"this session trains at {of_run:g}, got {value:g}: leave the field out"
            )
        changes[name] = value
        if name == "temperature":
            changes["greedy"] = value == 0
    stops = body.strings("stop", MAX_STOPS) or body.strings("stop_sequences", MAX_STOPS)
    if stops:
        changes["stop"] = [*(run.stop or []), *stops]
    if max_tokens is not None:
        changes["max_new_tokens"] = min(max_tokens, run.max_new_tokens)
        changes["min_new_tokens"] = min(run.min_new_tokens, max_tokens)
    return run.new(**changes)


def read_enable_thinking(body: Fields, default: bool) -> bool:
    """`chat_template_kwargs: {"enable_thinking": bool}`; no other variable is taken."""
    options = body.object("chat_template_kwargs")
    options.only(["enable_thinking"])
    return options.flag("enable_thinking") if options.has("enable_thinking") else default


async def complete(session: Session, ask: Ask) -> list[Completion]:
    """`ask.num_choices` answers, recorded in the session in the order of their index.

    Raises:
      ProxyError: 400, the prompt leaves no room; 401, the session ended meanwhile; 503, an
        answer did not end.
    """
    parent, prompt_ids = _prompt(session, ask)
    room = ask.gconfig.max_tokens - len(prompt_ids)
    if room < 1:
        raise ProxyError(
            400,
            f"messages: they are {len(prompt_ids)} tokens, and with an answer at most "
            f"{ask.gconfig.max_tokens} are allowed",
            code="context_length_exceeded",
            param="messages",
        )
    async with asyncio.TaskGroup() as tasks:
        samples = [
            tasks.create_task(session.finish(_sample(session, ask, prompt_ids, index)))
            for index in range(ask.num_choices)
        ]
    request_id, turn = uuid.uuid4().hex, session.next_turn()
    completions = []
    for index, sample in enumerate(samples):
        response = sample.result()
        text, stop = _text(session, ask, response)
        said, calls = split_tool_calls(text) if ask.setting.tools else (text, ())
        message = Message("assistant", said, tool_calls=calls)
        completion = Completion(request_id, index, turn, parent, response, message, text, stop)
        completions.append(completion)
    session.record(completions, ask.setting, ask.messages)
    return completions


def _prompt(session: Session, ask: Ask) -> tuple[Completion | None, list[int]]:
    """The completion that is gone on from, and the tokens; its own stand in them verbatim."""
    parent, index = session.longest_history(ask.setting, ask.messages)
    if parent is not None:
        rest = session.template.after_answer(
            ask.setting,
            ask.messages,
            index,
            parent.response.output_tokens,
            has_ended=parent.response.stop_reason != "length",
        )
        if rest is not None:
            return parent, parent.tokens + rest
        session.num_retokenised += 1
        session.counts.num_retokenised += 1
        if session.counts.num_retokenised == 1:
            logger.warning(
                "the chat template cannot go on from an answer: the conversation is tokenised "
                "again, and trained as another one (later ones are not told)"
            )
    return None, session.template.prompt(ask.setting, ask.messages)


def _sample(
    session: Session, ask: Ask, prompt_ids: list[int], index: int
) -> asyncio.Task[ModelResponse]:
    seed = session.take_seed() if ask.seed is None else ask.seed + index

    async def sample() -> ModelResponse:
        request = ModelRequest(
            rid=session.session_id,  # one server has the prefixes of the whole session
            input_ids=list(prompt_ids),
            gconfig=ask.gconfig.new(seed=seed),
        )
        response = await session.engine.agenerate(request)
        counts = (len(response.output_logprobs), len(response.output_versions))
        assert counts == (response.output_len,) * 2, "a logprob and a version for each token"
        assert response.input_tokens == prompt_ids, "the prompt is what was asked"
        if response.stop_reason == "abort":
            raise ProxyError(503, "the answer was aborted")
        return response

    return asyncio.create_task(sample())


def _text(session: Session, ask: Ask, response: ModelResponse) -> tuple[str, str | None]:
    """Of the answer, up to the stop string if one ended it; and that string."""
    text = session.template.decode(
        response.output_tokens, skip_special_tokens=ask.gconfig.skip_special_tokens
    )
    if response.stop_reason == "length":
        return text, None
    ends = [(at, stop) for stop in ask.gconfig.stop or [] if (at := text.find(stop)) >= 0]
    if not ends:
        return text, None
    at, stop = min(ends)
    return text[:at], stop
