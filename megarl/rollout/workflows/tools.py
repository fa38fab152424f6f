"""Answers with tools: the model calls, reads what came back, and goes on.

    prompt with tools  answer 1 with a call  results  answer 2 ...  results  last answer
    given              sampled               given    sampled       given    sampled

Token ids go into the next turn as they were sampled. What stands between two answers is written
by the chat template and tokenised once; it is masked out of the loss.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import GenerationEngine, ModelRequest, ModelResponse, Row
from megarl.rollout.proxy.messages import Message, Setting, ToolCall
from megarl.rollout.proxy.template import ChatTemplate
from megarl.rollout.proxy.tool_calls import split_tool_calls
from megarl.rollout.sandbox import PythonSandbox, SandboxResult
from megarl.rollout.workflows.conversation import Conversation
from megarl.rollout.workflows.reward_fn import AnyRewardFn, RLVRWorkflow
from megarl.trajectory import Trajectory

_CALL = "<tool_call>"
_END_OF_THOUGHT = "</think>"
_UNREADABLE = (
    "Error: a tool call could not be read. Write each as\n<tool_call>\n"
    '{"name": "...", "arguments": {...}}\n</tool_call>'
)


class ToolError(Exception):
    """What went wrong in a tool is the model's to read: it is told the text."""


class Tool(Protocol):
    """A tool of a ToolWorkflow. One instance serves all conversations at the same time."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object: what `run` takes by keyword."""

    @property
    def run(self) -> Callable[..., Awaitable[str]]:
        """What the model reads. ToolError is told it; any other exception ends its episode."""


class PythonTool:
    """Runs Python in a sandbox; each call is a new process. `sandbox` None is the defaults."""

    name = "python"
    description = (
        "Runs a Python script and returns what it prints. Nothing is kept from one call to the "
        "next, and there is no network."
    )
    parameters: dict[str, Any] = {  # noqa: RUF012 - Tool has it as an instance's
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The script."}},
        "required": ["code"],
    }

    def __init__(self, sandbox: PythonSandbox | None = None) -> None:
        self.sandbox = sandbox or PythonSandbox()

    async def run(self, code: str) -> str:
        if not isinstance(code, str):
            raise ToolError(f"code must be a string, got {type(code).__name__}")
        result = await self.sandbox.run(code)
        parts = [result.stdout, result.stderr, self._end(result)]
        return "\n".join(text for part in parts if (text := part.rstrip()))

    def _end(self, result: SandboxResult) -> str:
        limits = self.sandbox.limits
        match result.why:
            case "ok":
                return "" if result.stdout.strip() else "(no output)"
            case "timeout":
                return f"Error: stopped after {min(limits.wall_s, limits.cpu_s):g} s"
            case "output":
                return "Error: stopped, too much output"
            case "processes":
                return "Error: stopped, too many processes"
            case _:
                return f"Error: exit code {result.exit_code}"


class ToolWorkflow(RLVRWorkflow):
    """Conversations in which the model may call tools, in the form of Hermes and Qwen models.

    One ends with the first answer that has no call, was cut, or is the last of `max_turns`, and
    where no room is left in `gconfig.max_tokens`. Its reward is the last answer's. Calls of one
    answer run at the same time. A call that cannot be read, has wrong arguments, names no tool
    or is one too many is answered by an error. `gconfig.n_samples` conversations form a group.

    `calls` counts calls by tool and by how they failed, since the start.

    Args:
      reward_fn: see as_reward_fn; called as fn(prompt, completion, prompt_ids,
        completion_ids, **row) with the last answer, the prompt being all that stands before it.
        None rejects the conversation.
      tools: None is a PythonTool.
      max_turns: answers of one conversation.
      max_tool_calls: of one conversation.
      max_result_tokens: of one result; the middle of a longer one is left out.
      options: those of RLVRWorkflow, without get_input_ids_fn.

    Raises:
      ValueError: a bound below 1, two tools of one name, or the tokenizer has no chat template.
    """

    def __init__(
        self,
        reward_fn: AnyRewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        tools: Sequence[Tool] | None = None,
        *,
        max_turns: int = 8,
        max_tool_calls: int = 16,
        max_result_tokens: int = 1024,
        **options: Any,
    ) -> None:
        bounds = (max_turns, max_tool_calls, max_result_tokens)
        if min(bounds) < 1:
            raise ValueError(
                f"need max_turns, max_tool_calls and max_result_tokens >= 1, got {bounds}"
            )
        super().__init__(reward_fn, gconfig, tokenizer, **options)
        self.max_turns, self.max_tool_calls = max_turns, max_tool_calls
        self.max_result_tokens = max_result_tokens
        tools = [PythonTool()] if tools is None else tools
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ValueError(f"two tools of one name: {[tool.name for tool in tools]}")
        self.calls: Counter[str] = Counter()
        self.template = ChatTemplate(tokenizer)
        self._setting = Setting(tuple(map(_schema, tools)), self.enable_thinking)
        self._unspeakable = _control_texts(tokenizer)
        self.get_input_ids_fn = self._prompt_ids
        after = self._after([Message("user", "question")], ModelResponse(), "", ["result"])
        if after is None:
            raise ValueError("the chat template does not write a tool's result behind an answer")

    def _prompt_ids(self, prompt: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
        return self.template.prompt(self._setting, _messages(prompt))

    async def _sample(
        self, engine: GenerationEngine, rid: str, index: int, input_ids: list[int], data: Row
    ) -> Trajectory | None:
        """One conversation as a trajectory [1, S]; None if it was rejected."""
        chat = _messages(self.data_extract_prompt_fn(data))
        conversation, num_calls = Conversation(input_ids), 0
        for turn in range(self.max_turns):
            seed = self.gconfig.seed
            if seed is not None:
                seed = self._seed(data) + index * self.max_turns + turn
            given = list(conversation.tokens)
            request = ModelRequest(
                rid=rid,
                input_ids=given,
                gconfig=self.gconfig.new(n_samples=1, seed=seed),
                tokenizer=self.tokenizer,
            )
            response = await engine.agenerate(request)
            conversation.take(response)
            if response.stop_reason == "length" or turn + 1 == self.max_turns:
                break
            text = self.template.decode(response.output_tokens, skip_special_tokens=False)
            results = await self._results(text, self.max_tool_calls - num_calls)
            num_calls += len(results)
            if not results:
                break
            between = self._after(chat, response, text, results)
            assert between is not None, "the template wrote a result at the start"
            if len(conversation.tokens) + len(between) >= self.gconfig.max_tokens:
                break
            conversation.give(between)
        score = await self._score(given, response, data)
        return None if score is None else conversation.as_trajectory(score)

    def _after(
        self, chat: list[Message], response: ModelResponse, text: str, results: list[str]
    ) -> list[int] | None:
        """Tokens between an answer and the next one; `chat` grows by both."""
        chat.append(Message("assistant", text))
        answer = len(chat) - 1
        chat += [Message("tool", result) for result in results]
        return self.template.after_answer(
            self._setting,
            chat,
            answer,
            response.output_tokens,
            has_ended=response.stop_reason != "length",
        )

    # ------------------------------------------------------------------ calls

    async def _results(self, text: str, calls_left: int) -> list[str]:
        """What an answer's calls gave, in their order; what could not be read is the last."""
        said, calls = split_tool_calls(text)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._call(call, is_allowed=i < calls_left))
                for i, call in enumerate(calls)
            ]
        results = [task.result() for task in running]
        if _CALL in said.rpartition(_END_OF_THOUGHT)[2]:
            self.calls["unreadable"] += 1
            results.append(_UNREADABLE)
        return results

    async def _call(self, call: ToolCall, *, is_allowed: bool) -> str:
        tool, arguments = self.tools.get(call.name), call.parsed()
        try:
            if not is_allowed:
                raise ToolError("no more tool calls are allowed: answer now")
            if tool is None:
                raise ToolError(f"there is no tool of that name, only {', '.join(self.tools)}")
            _check_arguments(tool.run, arguments)
            result = await tool.run(**arguments)
        except ToolError as error:
            self.calls["refused"] += 1
            return self._bounded(f"Error: {error}")
        self.calls[call.name] += 1
        return self._bounded(result)

    def _bounded(self, text: str) -> str:
        """At most `max_result_tokens` of it, and no text that begins or ends a turn."""
        for token in self._unspeakable:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        text = text.encode(errors="replace").decode()  # half a surrogate pair is no text
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        left_out = len(tokens) - self.max_result_tokens
        if left_out <= 0:
            return text
        head = self.max_result_tokens // 2
        tail = self.max_result_tokens - head
        first, last = (
            self.template.decode(part, skip_special_tokens=False)
            for part in (tokens[:head], tokens[-tail:])
        )
        return f"{first}\n... {left_out} tokens left out ...\n{last}"

    def export_stats(self) -> dict[str, float]:
        return {f"tool_calls/{name}": float(n) for name, n in dict(self.calls).items()}


def _messages(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    for message in prompt:
        more = [k for k, v in message.items() if v is not None and k not in ("role", "content")]
        if more or not isinstance(message["content"], str):
            raise ValueError(f"expected messages of role and text content alone, got {message}")
    return [Message(message["role"], message["content"]) for message in prompt]


def _schema(tool: Tool) -> str:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps({"type": "function", "function": function})


def _control_texts(tokenizer: Any) -> list[str]:
    """Texts that the tokenizer reads as one token of its own: marks of turns and of calls."""
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    return sorted({text for text in (*added, *tags) if len(text) > 1 and text.strip()})


def _check_arguments(run: Callable[..., Any], arguments: Any) -> None:
    try:
        inspect.signature(run).bind(**arguments)
    except TypeError as error:
        raise ToolError(f"wrong arguments: {error}") from error
