"""The rollout pool against a server that only answers: requests, CPU time, overhead, memory.

    python benchmarks/rollout.py --json benchmarks/results/rollout_cpu.json

Server and client are processes of their own on this machine. The client is what a run has:
RemoteInferenceEngine.prepare_batch, the executor, ServerClient, RLVRWorkflow with an async reward
and a tokenizer that does nothing, version after version. Beside it, in turns, a client that only
posts with aiohttp and parses the JSON: what no pool in Python with this library can be below.

    full     the server answers at once: requests/s, and CPU milliseconds a request
    paced    answers take so long that `--rate` requests/s keep the same number in flight: how much
             later than the server said an episode ends, its reward and its tensors included

Batches are checked; a wrong one is a failure, and nothing is reported.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from rollout_clients import CPU, Case, run_bare, run_pool, run_soak
from timing import CheckFailed, environment, stats_of, write_json

_CLIENT_LIMIT_S = 1800.0
CLIENTS = {"pool": run_pool, "bare": run_bare}


def _client_process(connection: Any, client: Any, case: Case, address: str) -> None:
    try:
        connection.send((client(case, address), None))
    except CheckFailed as error:
        connection.send((None, str(error)))


@contextmanager
def scripted_server(delay_s: float) -> Iterator[str]:
    """Its address."""
    path = Path(__file__).with_name("scripted_server.py")
    command = [sys.executable, str(path), "--delay-s", str(delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def measure(client: Any, case: Case) -> dict[str, float]:
    """What `client` found, run in a new process against a new server.

    Raises:
      CheckFailed: a batch was wrong, or the process ended.
    """
    context = multiprocessing.get_context("spawn")
    with scripted_server(case.delay_s) as address:
        ours, theirs = context.Pipe()
        arguments = (theirs, client, case, address)
        process = context.Process(target=_client_process, args=arguments, daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(_CLIENT_LIMIT_S):
                raise CheckFailed(f"{client.__name__} {case}: no end in {_CLIENT_LIMIT_S} s")
            found, failure = ours.recv()
        except EOFError:
            raise CheckFailed(f"{client.__name__} {case}: its process ended") from None
        finally:
            process.terminate()
            process.join()
        if failure:
            raise CheckFailed(f"{client.__name__} {case}: {failure}")
        server = asyncio.run(_stats_of(address))
    late_ms = 1e3 * server["late_p99_s"]
    server_ms = 1e3 * server["cpu_s"] / max(1, server["requests"])
    result: dict[str, float] = found | {"server_cpu_ms": server_ms, "server_late_p99_ms": late_ms}
    return result


async def _stats_of(address: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(address + "/stats") as answer:
        stats: dict[str, float] = await answer.json()
    return stats


def compare(load: str, case: Case, turns: int) -> list[dict[str, Any]]:
    """A row a client; their turns alternate."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for _ in range(turns):
        for name, client in CLIENTS.items():
            samples[name].append(measure(client, case))
    rows = []
    for name, found in samples.items():
        row: dict[str, Any] = {"load": load, "client": name, **dataclasses.asdict(case)}
        for key in found[0]:
            row[key] = dataclasses.asdict(stats_of([one[key] for one in found]))
        rows.append(row)
    floor = rows[1]["cpu_ms"]["median"]
    rows[0]["cpu_over_bare"] = rows[0]["cpu_ms"]["median"] / floor
    return rows


def report(found: dict[str, object], rows: list[dict[str, Any]]) -> str:
    lines = [f"{key}: {value}" for key, value in found.items()]
    head = f"  {'':<6}{'req/s':>9}{'CPU ms':>9}{'p10':>7}{'p90':>7}{'x bare':>8}"
    head += f"{'over p50 ms':>13}{'p99':>8}{'peak MB':>9}{'server ms':>11}{'late p99':>10}"
    title = None
    for row in rows:
        if row["load"] == "soak":
            begin, end = (row[f"bytes_at_{when}"] / 1e6 for when in ("tenth", "end"))
            lines += ["", f"{row['episodes']} episodes: resident MB {begin:.1f} -> {end:.1f}"]
            continue
        new = (
            f"{row['load']}: {row['in_flight']} in flight, groups of {row['group_size']}, "
            f"{row['response_tokens']} tokens, delay {row['delay_s']:.2f} s"
        )
        if new != title:
            title = new
            lines += ["", title, head]
        cpu, ratio = row["cpu_ms"], row.get("cpu_over_bare")
        lines.append(
            f"  {row['client']:<6}{row['requests_per_s']['median']:>9.0f}{cpu['median']:>9.3f}"
            f"{cpu['p10']:>7.3f}{cpu['p90']:>7.3f}{f'{ratio:.2f}' if ratio else '':>8}"
            f"{row['overhead_p50_ms']['median']:>13.2f}{row['overhead_p99_ms']['median']:>8.2f}"
            f"{row['peak_bytes']['median'] / 1e6:>9.1f}{row['server_cpu_ms']['median']:>11.3f}"
            f"{row['server_late_p99_ms']['median']:>10.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=3, help="of each client")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--requests", type=int, default=8000, help="measured in a turn")
    parser.add_argument("--rate", type=float, default=400.0, help="requests/s of the paced load")
    parser.add_argument("--soak", type=int, default=200_000, help="episodes; 0 is none")
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = environment(CPU, ("benchmarks", "megarl"))
    found |= {"aiohttp": aiohttp.__version__, "rate": arguments.rate, "open_files": [soft, hard]}
    rows: list[dict[str, Any]] = []
    try:
        for in_flight in arguments.in_flight:
            for group_size in arguments.groups:
                for tokens in arguments.tokens:
                    case = Case(in_flight, group_size, tokens, arguments.requests)
                    rows += compare("full", case, arguments.turns)
                    delay_s = in_flight / arguments.rate
                    paced = dataclasses.replace(case, delay_s=delay_s)
                    rows += compare("paced", paced, arguments.turns)
        if arguments.soak:
            case = Case(max(arguments.in_flight), 1, 1, arguments.soak)
            soak = {"load": "soak", **dataclasses.asdict(case), **measure(run_soak, case)}
            rows.append(soak)
    except CheckFailed as error:
        print(f"FAILED {error}", file=sys.stderr)
        return 1
    found |= {"load_after": os.getloadavg()[0]}
    print(report(found, rows))
    write_json(arguments.json, found, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
