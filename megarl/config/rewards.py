"""What an answer is worth: a function, or a reward model behind HTTP."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from megarl.config.rules import above_zero, at_least, require

_FN = "megarl.data.reasoning_gym:final_number_reward"
_OF_A_MODEL = {
    "protocol": "json",
    "model": None,
    "label": 0,
    "tokenizer_path": None,
    "api_key_env": None,
}
KEY_VARIABLES = {"MEGARL_PROXY_ADMIN_KEY"}
"""Names of environment variables that hold a key of ours, with each `api_key_env` of this
process: no process that a user's function runs in gets them."""
_WRITES_TEXT = ("vllm_classify", "vllm_pooling", "sglang_classify")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    fn: str = _FN
    """`package.module:function`, called as fn(prompt, completion, prompt_ids,
    completion_ids, **row) -> float. A function runs in `num_workers` processes; an `async def`
    is awaited in the rollout loop, which it must not block, and may return None for no episode."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of each call of `fn`; the row's own go before them."""
    url: str | None = None
    """Of a reward model, with the path that is posted to, such as http://HOST:PORT/classify.
    Then `fn` is not used."""
    protocol: Literal["json", "vllm_classify", "vllm_pooling", "vllm_score", "sglang_classify"] = (
        "json"
    )
    """What is posted to `url` and how the answer is read, see megarl/rollout/reward_model.py."""
    model: str | None = None
    """The model's name in requests to vLLM; None leaves it out."""
    label: int = 0
    """Of a reward model with several scores: which one is the reward."""
    tokenizer_path: str | None = None
    """Folder of the reward model's tokenizer, whose chat template then writes the chat. None
    sends prompt and completion as the text that the policy read and wrote."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key for `url`. Processes of a function do
    not get it."""
    timeout_s: float = 15.0
    """One call, without its wait for a process or a place. The process of a call that is late
    is killed."""
    max_attempts: int = 3
    num_workers: int = 2
    """Processes of a function."""
    max_concurrent: int | None = None
    """Calls at one time of an async `fn` (None: one for each CPU) or of a reward model (64)."""
    on_failure: Literal["zero", "reject"] = "zero"
    """What a call that failed `max_attempts` times is worth: reward 0, or no episode."""

    def __post_init__(self) -> None:
        require(":" in self.fn, f"fn: expected package.module:function, got {self.fn!r}")
        above_zero(self, "timeout_s", "max_attempts", "num_workers", "max_concurrent")
        at_least(self, 0, "label")
        # Not the value: who writes the key itself here must not read it in a log.
        require(
            self.api_key_env is None or re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env) is not None,
            "api_key_env: must be the name of an environment variable",
        )
        if self.api_key_env is not None:
            KEY_VARIABLES.add(self.api_key_env)
        if self.url is None:
            for name, default in _OF_A_MODEL.items():
                value = getattr(self, name)
                require(value == default, f"{name}: {value!r} needs url, which is null")
            return
        self._check_url(self.url)
        require(
            self.fn == _FN and not self.options,
            f"url: the reward is either a model's or a function's, fn is {self.fn!r} with "
            f"options {self.options}",
        )
        require(
            self.tokenizer_path is None or self.protocol in _WRITES_TEXT,
            f"tokenizer_path: protocol {self.protocol} sends no chat, only "
            f"{', '.join(_WRITES_TEXT)} do",
        )

    @staticmethod
    def _check_url(url: str) -> None:
        try:
            parts = urlsplit(url)
            is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
            has_secret = parts.username is not None
            _ = parts.port
        except ValueError:
            is_http = has_secret = False
        # The url is told when a call fails: it must hold no password.
        require(not has_secret, "url: must hold no user and password; see api_key_env")
        require(is_http, f"url: expected http://HOST:PORT/PATH, got {url!r}")
