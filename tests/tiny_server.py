"""A tiny model, a real vLLM server of it, and a loop to talk to servers from a test."""

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers as tr
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megarl.config.schema import GenerationHyperparameters, RolloutParallelConfig, VLLMConfig
from megarl.errors import EngineError
from megarl.rollout.api import GenerateChunk, ModelRequest
from megarl.rollout.client import ServerClient
from megarl.rollout.servers import ServerCommand, vllm_command, wait_healthy

START_TIMEOUT_S = 300.0  # 16 s on two quiet cores, minutes when others build on them
REQUEST_TIMEOUT_S = 120.0
MAX_MODEL_LEN = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> tr.PreTrainedTokenizerFast:
    """256 bytes and three special tokens, the last of which ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tr.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL_TOKENS[0], eos_token=SPECIAL_TOKENS[-1]
    )


def random_model(seed: int) -> tr.Qwen3ForCausalLM:
    """float32 Qwen3 with tied embeddings, 600 kB; the same shapes for every seed."""
    config = tr.Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention has
        intermediate_size=96,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
        pad_token_id=256,
        eos_token_id=258,
        attn_implementation="eager",
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(seed)
    model = tr.Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones are what a server has without any push
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def named_weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What an export yields; a tied head is not a tensor of its own."""
    return list(model.named_parameters())


@torch.no_grad()
def hf_logprobs(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """log_softmax(logits / temperature) of each response token, by transformers."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


class LoopThread:
    """What a sender needs of the rollout engine, and no more: clients and their loop."""

    def __init__(self, clients: list[ServerClient]) -> None:
        self.clients = clients
        self.dropped: dict[str, str] = {}
        """Address -> why."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, coro: Coroutine) -> Any:
        """A concurrent future."""
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        return self.start(coro).result(timeout_s)

    def wait_for_clients(self) -> list[ServerClient]:
        return self.clients

    def refitted(self, clients: list[ServerClient]) -> None:
        """All of these are always in use."""

    def drop(self, client: ServerClient, why: str) -> None:
        self.run(client.close())
        self.dropped[client.address] = why
        if len(self.clients) == 1:
            raise EngineError(f"no server is left: {why}")
        self.clients.remove(client)

    def close(self) -> None:
        for client in self.clients:
            self.run(client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(REQUEST_TIMEOUT_S)
        self._loop.close()


async def generate(
    client: ServerClient, prompt: list[int], num_tokens: int, **options: Any
) -> GenerateChunk:
    """`num_tokens` sampled tokens; `options` are GenerationHyperparameters."""
    gconfig = GenerationHyperparameters(ignore_eos=True, **options)
    request = ModelRequest(input_ids=prompt)
    return await client.generate(request, gconfig, num_tokens)


@dataclass(frozen=True)
class RunningServer:
    address: str
    model_folder: Path
    log: Path
    pid: int

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def running_server(
    folder: Path,
    *,
    parallel: RolloutParallelConfig | None = None,
    config: tr.PreTrainedConfig | None = None,
    extra_args: Sequence[str] = (),
    names_versions: bool = True,
    port: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> Iterator[RunningServer]:
    """A vLLM server with random weights that no test knows. Ends with its whole tree.

    Args:
      names_versions: has the route whose answers name the version of each token.
      port: to listen on; None is any.
    """
    model_folder, log = folder / "model", folder / "server.log"
    (config or random_model(0).config).save_pretrained(model_folder)
    byte_tokenizer().save_pretrained(model_folder)
    host, port = "127.0.0.1", port or free_port()
    address = f"{host}:{port}"
    command = vllm_command(
        str(model_folder),
        host,
        port,
        vllm=VLLMConfig(
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=16,
            extra_args=["--kv-cache-memory-bytes", str(64 << 20), *extra_args],
        ),
        parallel=parallel or RolloutParallelConfig(),
        device="cpu",
        load_format="dummy",
        weight_backend=True,
        server_index=0,
    )
    if not names_versions:
        command.argv.remove("--enable-scale-out")
    with serving(command, address, log) as process:
        yield RunningServer(f"http://{address}", model_folder, log, process.pid)


@contextmanager
def serving(command: ServerCommand, address: str, log: Path) -> Iterator[subprocess.Popen]:
    """The process of a server that is healthy; ends with its whole tree."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, stdout=output, stderr=output
        )
    try:
        asyncio.run(wait_healthy(address, START_TIMEOUT_S, lambda: _ending(process, log)))
        yield process
    finally:
        end_tree(process.pid)
        process.wait(REQUEST_TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_tree(pid: int, *, politely: bool = True) -> None:
    """End a process and all that it started."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    alive = [root, *root.children(recursive=True)]
    if politely:
        root.terminate()
        _, alive = psutil.wait_procs(alive, timeout=10)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=10)


def _ending(process: subprocess.Popen, log: Path) -> str | None:
    code = process.poll()
    if code is None:
        return None
    return f"exit code {code}; log: {log.read_text(errors='replace')[-2000:]}"
