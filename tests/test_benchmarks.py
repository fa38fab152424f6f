"""`benchmarks/kernels.py` on the CPU at small sizes: that it runs, and that it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=FOLDER, check=False
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What it printed, and its JSON."""
    path = tmp_path_factory.mktemp("benchmarks") / "kernels.json"
    result = python("kernels.py", "--quick", "--device", "cpu", "--json", str(path))
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(path.read_text())


def test_every_number_has_its_circumstances(measured):
    printed, found = measured
    environment = found["environment"]
    for key in ("commit", "torch", "threads", "cpu", "load_before", "peers", "date"):
        assert environment[key], key
        assert f"{key}: {environment[key]}" in printed
    assert environment["is_quick"]


def test_ours_are_timed_and_checked(measured):
    rows = [row for row in measured[1]["rows"] if row["name"].startswith("megarl")]
    assert {row["section"].split()[0] for row in rows} >= {
        *("forward:", "with", "linear", "pack", "unpack", "fp8")
    }
    for row in rows:
        assert row["error"] is not None
        assert row["stats"]["p10"] <= row["stats"]["median"] <= row["stats"]["p90"]
        assert row["speedup"] > 0


WRONG = {
    "a logprob off by a thousandth": (
        "logprob",
        """
right = logprob.token_logprob_entropy
def wrong(*arguments, **options):
    logp, entropy = right(*arguments, **options)
    return logp + 1e-3, entropy
logprob.token_logprob_entropy = wrong
""",
        "FAILED logprob forward [64, 4001] float32: error 0.001",
    ),
    "one bit of one element packed": (
        "pack",
        """
right = pack.PackTable.pack
def wrong(self, bucket):
    right(self, bucket)
    bucket[-2] ^= 1
pack.PackTable.pack = wrong
""",
        "FAILED pack 25 boxes, 0.5 M elements, bfloat16 and bfloat16: error 1,",
    ),
    "one element unpacked outside of its box": (
        "pack",
        """
right = pack.PackTable.unpack
def wrong(self, bucket):
    right(self, bucket)
    self._owners[-1][1][0, 0] = 1
pack.PackTable.unpack = wrong
""",
        "FAILED unpack 25 boxes, 0.5 M elements, bfloat16 and bfloat16: error 1,",
    ),
    "one code and one scale off by one bit": (
        "pack",
        """
import torch
right = pack.quantize_fp8_blocks
def wrong(x):
    codes, scales = right(x)
    codes.view(torch.uint8)[-1, -1] ^= 1
    scales.view(torch.int32)[-1, -1] ^= 1
    return codes, scales
pack.quantize_fp8_blocks = wrong
""",
        "FAILED fp8 blocks 1 matrix [300, 264], bfloat16: error 2,",
    ),
}


@pytest.mark.parametrize(("section", "damage", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_op_is_no_number(tmp_path, section, damage, said):
    code = (
        f"import sys, kernels, {section}\n{damage}\n"
        f"sys.argv = ['kernels.py', '--quick', '--device', 'cpu', '--only', '{section}']\n"
        f"sys.argv += ['--json', {str(tmp_path / 'kernels.json')!r}]\n"
        "sys.exit(kernels.main())\n"
    )
    result = python("-c", code)
    assert result.returncode == 1
    assert said in result.stderr
    assert result.stdout == ""
    assert not os.listdir(tmp_path)


def test_floors_are_bytes_over_bandwidth():
    result = python("kernels.py", "--floors", "4000")
    assert result.returncode == 0
    # 8192 tokens x 151936 columns x 2 bytes / 4000 GB/s
    assert " 0.622 / 1.867 / 1.245" in result.stdout


@pytest.mark.server
def test_every_way_of_a_push_is_timed_and_checked(tmp_path):
    path = tmp_path / "bridge.json"
    result = python("bridge.py", "--quick", "--json", str(path))
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    rows = {row["way"]: row for row in found["rows"]}
    assert list(rows) == ["broadcast", "sharded", "sharded, overlap", "disk"]
    weight_bytes = 4 * found["environment"]["parameters"]
    for name, row in rows.items():
        assert row["total_s"]["median"] >= row["pause_s"]["median"] > 0
        assert name in result.stdout
        if name.startswith("sharded"):
            assert row["bytes_sent"] == row["bytes_optimal"] == weight_bytes
            # Two workers: each takes half of what is cut, and all of what is not.
            assert weight_bytes < sum(row["bytes_into_workers"]) < 1.2 * weight_bytes
        else:
            assert row["bytes_sent"] >= weight_bytes


ROLLOUT = ("--in-flight", "8", "--groups", "2", "--tokens", "3", "--requests", "40")


def test_the_pool_is_timed_beside_a_bare_client(tmp_path):
    path = tmp_path / "rollout.json"
    sizes = ("--turns", "1", "--rate", "200", "--soak", "60", "--json", str(path))
    result = python("rollout.py", *ROLLOUT, *sizes)
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    for key in ("commit", "aiohttp", "cpu", "load_before", "load_after", "date"):
        assert found["environment"][key], key
    *rows, soak = found["rows"]
    assert [(row["load"], row["client"]) for row in rows] == [
        (load, client) for load in ("full", "paced") for client in ("pool", "bare")
    ]
    for row in rows:
        assert row["cpu_ms"]["samples"] == 1
        assert 0 < row["cpu_ms"]["p10"] <= row["cpu_ms"]["median"] <= row["cpu_ms"]["p90"]
        assert row["requests"]["median"] >= 40
        assert row["overhead_p50_ms"]["median"] <= row["overhead_p99_ms"]["median"]
        assert row["server_cpu_ms"]["median"] > 0
        assert ("cpu_over_bare" in row) == (row["client"] == "pool")
        if row["load"] == "paced":  # 8 in flight at 40 ms each
            assert row["requests_per_s"]["median"] < 400
    assert soak["episodes"] == 60
    assert soak["bytes_at_end"] > 0


def test_a_pool_that_loses_or_mixes_rows_is_no_number(tmp_path):
    wrong = {
        "a reward is another row's": 'batch["rewards"] = batch["rewards"].flip(0)',
        "tokens were sampled in": 'batch["loss_mask"][0, -1] = 0',
        "a version or a logprob is not the server's": 'batch["versions"] += 1',
    }
    for said, damage in wrong.items():
        code = (
            "import sys, rollout, rollout_clients as clients\nright = clients.check\n"
            f"def check(batch, *rest):\n    {damage}\n    right(batch, *rest)\n"
            "clients.check = check\n"
            "case = clients.Case(4, 1, 3, 8)\n"
            "with rollout.scripted_server(0.0) as address:\n"
            "    try:\n        clients.run_pool(case, address)\n"
            "    except rollout.CheckFailed as error:\n        sys.exit(str(error))\n"
        )
        result = python("-c", code)
        assert result.returncode == 1
        assert said in result.stderr
