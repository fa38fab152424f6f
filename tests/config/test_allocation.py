"""The grammar of allocation strings."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.allocation import AllocationMode
from megarl.config.schema import ParallelConfig, RolloutParallelConfig
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "backend", "gen", "train", "train_dp"),
    [
        ("vllm.d1t2+d2t1p1", "vllm", {"tp": 2}, {}, 2),
        ("vllm:d1t2+megarl:d2t1p1", "vllm", {"tp": 2}, {}, 2),
        ("megatron:p2d3t4+vllm:p2t2d3", "vllm", {"dp": 3, "tp": 2, "pp": 2}, {"tp": 4, "pp": 2}, 3),
        (
            "sglang:d2t4+megarl:d4p2t4e8",
            "sglang",
            {"dp": 2, "tp": 4},
            {"tp": 4, "pp": 2, "ep": 8, "etp": 1},
            4,
        ),
        ("vllm:d2+megarl:d1c4", "vllm", {"dp": 2}, {"cp": 4}, 1),
        (
            "vllm:d1+megarl:(attn:d4p2t2c2|ffn:d2p2t4e2)",
            "vllm",
            {},
            {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 4},
            4,
        ),
        (
            "vllm:d1+megarl:(ffn:t4e2|attn:d4p2t2c2)",
            "vllm",
            {},
            {"tp": 2, "pp": 2, "cp": 2, "ep": 2, "etp": 4},
            4,
        ),
        ("vllm[rollout]:d2 + megarl[actor]:d4", "vllm", {"dp": 2}, {}, 4),
        ("vllm:t2+[actor]:t2", "vllm", {"tp": 2}, {"tp": 2}, 1),
    ],
)
def test_reads(text, backend, gen, train, train_dp):
    mode = AllocationMode.from_str(text)
    assert mode.backend == backend
    assert mode.gen == RolloutParallelConfig(**gen)
    assert mode.train == ParallelConfig(**train)
    assert mode.train_dp == train_dp
    assert mode.gen_world_size == mode.gen.dp * mode.gen.tp * mode.gen.pp
    # The world must also be one that the config's own rule takes, with the same dp.
    assert mode.train.dp(mode.train_world_size) == train_dp


@given(
    st.permutations("dtpc").flatmap(
        lambda letters: st.tuples(*[st.tuples(st.just(x), st.integers(1, 9)) for x in letters])
    )
)
def test_dims_in_any_order(dims):
    sizes = dict(dims)
    mode = AllocationMode.from_str("vllm:d1+megarl:" + "".join(f"{k}{v}" for k, v in dims))
    assert mode.train == ParallelConfig(tp=sizes["t"], pp=sizes["p"], cp=sizes["c"])
    assert mode.train_dp == sizes["d"]


@pytest.mark.parametrize(
    ("text", "piece", "reason"),
    [
        ("", "", "expected dimensions"),
        ("vllm:d2", "vllm:d2", "no trainer part"),
        ("megarl:d2", "megarl:d2", "no part of servers"),
        ("vllm:d2+sglang:d2+megarl:d1", "sglang:d2", "a second part of servers"),
        ("vllm:d2+d2+megarl:d1", "megarl:d1", "a second trainer part"),
        ("vllm:d2+fsdp:d2", "fsdp", "unknown backend; known: vllm, sglang, megarl, megatron"),
        ("vllm:d2+", "", "expected dimensions such as d2"),
        ("vllm:+megarl:d1", "", "expected dimensions such as d2"),
        ("vllm:d2c2+megarl:d1", "c2", "dimension must be one of d, t, p"),
        ("vllm:d2d4+megarl:d1", "d4", "dimension d is given twice"),
        ("vllm:d2+megarl:d2t", "t", "expected a letter of d, t, p, c, e and a number"),
        ("vllm:d2+megarl:2", "2", "expected a letter of"),
        ("vllm:d2+megarl:d0", "d0", "must be >= 1"),
        ("vllm:d2+megarl:d2e3", "d2e3", "does not divide the world of 2"),
        ("vllm:d2|megarl:d2", "vllm:d2|megarl:d2", "never share devices"),
        ("vllm:d1+megarl[a]:d2|megarl[c]:d2", "megarl[a]:d2|megarl[c]:d2", "never share devices"),
        ("vllm:d1+megarl:(attn:d2)", "(attn:d2)", "expected (attn:DIMS|ffn:DIMS)"),
        ("vllm:d1+megarl:(attn:d2|attn:d2)", "(attn:d2|attn:d2)", "expected (attn:DIMS|ffn:DIMS)"),
        ("vllm:d1+megarl:(attn:d2p2|ffn:p1e4)", "(attn:d2p2|ffn:p1e4)", "p2 and ffn p1 must be"),
        ("vllm:d1+megarl:(attn:d4|ffn:d1e2)", "(attn:d4|ffn:d1e2)", "the ffn world 2 must equal"),
        ("vllm:d1+megarl:(attn:d4|ffn:e3)", "(attn:d4|ffn:e3)", "= 3 does not divide"),
        ("vllm:d1+megarl:(attn:e2|ffn:e2)", "e2", "dimension must be one of d, t, p, c"),
    ],
)
def test_an_error_names_the_string_and_the_piece(text, piece, reason):
    pattern = f"^allocation_mode: {re.escape(repr(text))}: at {re.escape(repr(piece))}: .*"
    with pytest.raises(ConfigError, match=pattern + re.escape(reason)):
        AllocationMode.from_str(text)
