"""A reward model behind HTTP: one request for each answer; its server makes batches of them.

    protocol         posts                                       reads as the reward
    json             {"prompt", "completion", "prompt_ids",      ["reward"], null rejects
                      "completion_ids", "messages", "row"}
    vllm_classify    {"input"}         to /classify              ["data"][0]["probs"][label]
    vllm_pooling     {"input", "task"} to /pooling               ["data"][0]["data"], see below
    vllm_score       {"queries": prompt, "documents":            ["data"][0]["score"]
                      completion}      to /score
    sglang_classify  {"text"} or {"input_ids"} to /classify      ["embedding"][label]

Of vLLM 0.32 (its pooling models) and SGLang 0.5.23 (with --is-embedding). Both servers are asked
for scores as the model's head gives them: SGLang's /classify applies nothing to them, and vLLM is
sent `use_activation: false`. /pooling is asked for the score of the whole sequence; a model that
scores each token answers a row for each, of which the last counts.

SGLang 0.5.23 gives the head of a Qwen classification model a bias, random at each start where
the checkpoint has none: all scores of one server are off by one number (seen: 0.04).

The text is prompt and completion as the policy had them, or the row's chat and the completion
written by the reward model's own chat template (`tokenizer_path`), sent as tokens.
"""

import asyncio
import json
import os
from typing import Any

import aiohttp

from megarl.config.rewards import RewardConfig
from megarl.errors import ConfigError
from megarl.rollout.rewards import CallFailed, Reward, finite
from megarl.rollout.slots import Slots

_MAX_CONCURRENT = 64
_FIRST_RETRY_DELAY_S = 0.5
_KEEP_ALIVE_S = 3.0  # vLLM's servers close an idle connection after 5
_MAX_ERROR_CHARS = 300
_TRY_AGAIN = (408, 429)
"""Statuses below 500 of a server that has too much to do."""


class RewardModel(Reward):
    """Rewards from `config.url`. Failed attempts are counted as timeout, connection, `status N`
    and answer (it had no reward in it).

    Raises:
      ConfigError: the variable of `api_key_env` is not set, or the tokenizer has no template.
    """

    takes_messages = True

    def __init__(self, config: RewardConfig) -> None:
        assert config.url is not None, "as_reward_fn asks"
        super().__init__(
            config.url,
            max_attempts=config.max_attempts,
            on_failure=config.on_failure,
            first_delay_s=_FIRST_RETRY_DELAY_S,
        )
        self.config, self.url = config, config.url
        self._key = _key(config.api_key_env)
        self._tokenizer = _load_tokenizer(config.tokenizer_path)
        self._slots = Slots(config.max_concurrent or _MAX_CONCURRENT)
        self._session: aiohttp.ClientSession | None = None

    async def _attempt(
        self,
        prompt: str,
        completion: str,
        prompt_ids: list[int],
        completion_ids: list[int],
        **row: Any,
    ) -> float | None:
        messages = row.pop("messages", None)
        if self.config.protocol == "json":
            body = {
                "prompt": prompt,
                "completion": completion,
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "messages": messages,
                "row": row,
            }
        else:
            body = self._body(prompt, completion, messages)
        async with self._slots():
            answer = await self._post(body)
        try:
            value = self._read(answer)
        except (LookupError, TypeError) as error:
            raise CallFailed(
                f"answer: no reward by protocol {self.config.protocol} in "
                f"{self._told(json.dumps(answer))}",
                is_final=True,
            ) from error
        return None if value is None else finite(value)

    def _body(self, prompt: str, completion: str, messages: Any) -> dict[str, Any]:
        """What an engine's route takes."""
        model = {} if self.config.model is None else {"model": self.config.model}
        if self.config.protocol == "vllm_score":
            pair = {"queries": prompt, "documents": completion}
            return {**pair, "use_activation": False, **model}
        text: Any = prompt + completion
        if self._tokenizer is not None:
            if messages is None:
                raise ValueError("reward.tokenizer_path: the workflow gives no messages")
            chat = [*messages, {"role": "assistant", "content": completion}]
            written = self._tokenizer.apply_chat_template(chat, tokenize=False)
            text = list(self._tokenizer.encode(written, add_special_tokens=False))
        if self.config.protocol == "sglang_classify":
            return {"text" if isinstance(text, str) else "input_ids": text}
        task = {"task": "classify"} if self.config.protocol == "vllm_pooling" else {}
        return {"input": text, "use_activation": False, **task, **model}

    def _read(self, answer: Any) -> Any:
        """LookupError or TypeError if it is not there."""
        label = self.config.label
        match self.config.protocol:
            case "json":
                return answer["reward"]
            case "sglang_classify":
                return answer["embedding"][label]
            case "vllm_score":
                return answer["data"][0]["score"]
            case "vllm_classify":
                return answer["data"][0]["probs"][label]
            case "vllm_pooling":
                scores = answer["data"][0]["data"]
                return scores[-1][label] if isinstance(scores[-1], list) else scores[label]

    # ------------------------------------------------------------------ HTTP

    async def _post(self, body: dict[str, Any]) -> Any:
        """The answer's JSON."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            async with (
                asyncio.timeout(self.config.timeout_s),
                self._session.post(
                    self.url, json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                text = (await response.read()).decode(errors="replace")
        except TimeoutError as error:
            raise CallFailed(f"timeout: no answer within {self.config.timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise CallFailed(f"connection: {self._told(repr(error))}") from error
        if response.status != 200:
            may_pass = response.status >= 500 or response.status in _TRY_AGAIN
            raise CallFailed(f"status {response.status}: {self._told(text)}", is_final=not may_pass)
        try:
            return json.loads(text)
        except ValueError as error:
            raise CallFailed(f"answer: not JSON: {self._told(text)}", is_final=True) from error

    def _told(self, text: str) -> str:
        """`text` for a log: short, and without the key if a server repeats what it was sent."""
        if self._key is not None:
            text = text.replace(self._key, "***")
        return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + " ..."

    async def close(self) -> None:
        await super().close()
        if self._session is not None:
            await self._session.close()


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"reward.api_key_env: no environment variable {variable} is set")
    return key


def _load_tokenizer(path: str | None) -> Any:
    if path is None:
        return None
    from transformers import AutoTokenizer  # seconds, and other protocols do without

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward.tokenizer_path: {path}: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"reward.tokenizer_path: the tokenizer in {path} has no chat template")
    return tokenizer
