"""A real SGLang server of a tiny model. It runs in `.venv-sglang`, which `make sglang` makes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers as tr
from tiny_server import (
    MAX_MODEL_LEN,
    RunningServer,
    byte_tokenizer,
    free_port,
    random_model,
    serving,
)

from megarl.config.schema import RolloutParallelConfig, SGLangConfig
from megarl.rollout.servers import ServerCommand, sglang_command


@contextmanager
def running_sglang(
    folder: Path,
    *,
    tp: int = 1,
    config: tr.PreTrainedConfig | None = None,
    plugins: str = "megarl",
) -> Iterator[RunningServer]:
    """With random weights that no test knows. Ends with its whole tree.

    Args:
      plugins: names of those that SGLang may load.
    """
    model_folder, log = folder / "model", folder / "server.log"
    (config or random_model(0).config).save_pretrained(model_folder)
    byte_tokenizer().save_pretrained(model_folder)
    address = f"127.0.0.1:{free_port()}"
    host, _, port = address.partition(":")
    command = sglang_command(
        str(model_folder),
        host,
        int(port),
        sglang=SGLangConfig(
            dtype="float32",
            context_length=MAX_MODEL_LEN,
            max_running_requests=16,
            max_total_tokens=16384,
        ),
        parallel=RolloutParallelConfig(tp=tp),
        device="cpu",
        load_format="dummy",
        server_index=0,
    )
    # The name of the machine may have no address that gloo can listen on.
    env = {"GLOO_SOCKET_IFNAME": "lo", "SGLANG_PLUGINS": plugins, **command.env}
    command = ServerCommand(command.argv, env)
    with serving(command, address, log) as process:
        yield RunningServer(f"http://{address}", model_folder, log, process.pid)
