"""The short form of a run's placement, `vllm:d1t2+megarl:d2t1p1`, and nothing else.

    mode   := part '+' part                one of servers, one of the trainer, in any order
    part   := [backend] ['[' name ']'] (':' | '.') dims  |  dims
    dims   := (letter number)+             d t p c e, each at most once, in any order
            | '(' 'attn:' dims '|' 'ffn:' dims ')'

d, t, p, c are data, tensor, pipeline and context parallelism; the world of a part is
d * t * p * c. `e` (experts) folds inside that world. The attn/ffn form gives experts their own
tensor parallelism (ffn t); its two worlds and its two p are equal, and ffn d follows from them.
A part without a backend is the trainer's. `megatron` is another name for `megarl`.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NoReturn, cast

from megarl.config.schema import ParallelConfig, RolloutParallelConfig
from megarl.errors import ConfigError

ServerBackend = Literal["vllm", "sglang"]
SERVER_BACKENDS = ("vllm", "sglang")
TRAINER_BACKENDS = ("megarl", "megatron")

_PART = re.compile(r"(?:(?P<backend>[A-Za-z_]\w*)?(?:\[(?P<name>\w*)\])?[:.])?(?P<dims>.*)")
_HYBRID = re.compile(r"\((?P<first>attn|ffn):(?P<a>\w+)\|(?P<second>attn|ffn):(?P<b>\w+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationMode:
    """Servers and trainer of one run."""

    backend: ServerBackend
    gen: RolloutParallelConfig
    train: ParallelConfig
    train_dp: int

    @property
    def gen_world_size(self) -> int:
        return self.gen.world_size

    @property
    def train_world_size(self) -> int:
        return self.train_dp * self.train.model_size

    @classmethod
    def from_str(cls, text: str) -> "AllocationMode":
        """Parse `text`. ConfigError names `text` and the piece that is wrong."""
        gen: tuple[ServerBackend, RolloutParallelConfig] | None = None
        train: tuple[ParallelConfig, int] | None = None
        for part in _split(text):
            match = _PART.fullmatch(part)
            assert match is not None, part  # `dims` takes any text
            backend = match["backend"] or "megarl"
            if backend in SERVER_BACKENDS:
                if gen is not None:
                    _fail(text, part, "a second part of servers; one is supported")
                dims = _dims(text, match["dims"], "dtp")
                layout = RolloutParallelConfig(dp=dims["d"], tp=dims["t"], pp=dims["p"])
                gen = (cast(ServerBackend, backend), layout)
            elif backend in TRAINER_BACKENDS:
                if train is not None:
                    _fail(text, part, "a second trainer part; one is supported")
                train = _trainer(text, match["dims"])
            else:
                known = ", ".join(SERVER_BACKENDS + TRAINER_BACKENDS)
                _fail(text, backend, f"unknown backend; known: {known}")
        if gen is None:
            _fail(text, text, f"no part of servers ({' or '.join(SERVER_BACKENDS)})")
        if train is None:
            _fail(text, text, "no trainer part (megarl)")
        return cls(backend=gen[0], gen=gen[1], train=train[0], train_dp=train[1])

    def settings(self) -> dict[str, str | int]:
        """The same placement as dotted config keys."""
        train = self.train
        keys: dict[str, str | int] = {
            "rollout.backend": self.backend,
            "rollout.parallel.dp": self.gen.dp,
            "rollout.parallel.tp": self.gen.tp,
            "rollout.parallel.pp": self.gen.pp,
            "actor.parallel.tp": train.tp,
            "actor.parallel.pp": train.pp,
            "actor.parallel.cp": train.cp,
            "actor.parallel.ep": train.ep,
            "actor.world_size": self.train_world_size,
        }
        if train.etp is not None:
            keys["actor.parallel.etp"] = train.etp
        return keys


def _fail(text: str, piece: str, reason: str) -> NoReturn:
    raise ConfigError(f"allocation_mode: {text!r}: at {piece!r}: {reason}")


def _split(text: str) -> list[str]:
    """The parts between '+', without blanks. '|' outside parentheses is colocation."""
    packed = "".join(text.split())
    outside = re.sub(r"\([^()]*\)", lambda m: "_" * len(m[0]), packed)
    if "|" in outside:
        start = outside.rfind("+", 0, outside.index("|")) + 1
        end = outside.find("+", start)
        _fail(
            text,
            packed[start:] if end < 0 else packed[start:end],
            "'|' puts parts on the same devices; servers and trainer never share devices here, "
            "separate them with '+'",
        )
    bounds = [-1, *(i for i, c in enumerate(outside) if c == "+"), len(packed)]
    return [packed[a + 1 : b] for a, b in pairwise(bounds)]


def _dims(text: str, piece: str, letters: str) -> dict[str, int]:
    """`d2t4` -> {"d": 2, "t": 4}; every letter of `letters` not named is 1."""
    if not piece:
        _fail(text, piece, f"expected dimensions such as {letters[0]}2")
    sizes: dict[str, int] = {}
    rest = piece
    while rest:
        match = re.match(r"([a-zA-Z])([0-9]+)", rest)
        if match is None:
            _fail(text, rest, f"expected a letter of {', '.join(letters)} and a number")
        letter, size = match[1], int(match[2])
        if letter not in letters:
            _fail(text, match[0], f"dimension must be one of {', '.join(letters)}")
        if letter in sizes:
            _fail(text, match[0], f"dimension {letter} is given twice")
        if size < 1:
            _fail(text, match[0], "a dimension must be >= 1")
        sizes[letter] = size
        rest = rest[match.end() :]
    return {letter: sizes.get(letter, 1) for letter in letters}


def _trainer(text: str, piece: str) -> tuple[ParallelConfig, int]:
    """The trainer's layout and its data parallelism."""
    if piece.startswith("("):
        return _hybrid(text, piece)
    dims = _dims(text, piece, "dtpce")
    world = dims["d"] * dims["t"] * dims["p"] * dims["c"]
    if world % (dims["e"] * dims["p"]):
        _fail(text, piece, f"e{dims['e']} * p{dims['p']} does not divide the world of {world}")
    parallel = ParallelConfig(
        tp=dims["t"],
        pp=dims["p"],
        cp=dims["c"],
        ep=dims["e"],
        # Whole experts on each rank, as the name of the dimension says; (attn|ffn) splits them.
        etp=1 if dims["e"] > 1 else None,
    )
    return parallel, dims["d"]


def _hybrid(text: str, piece: str) -> tuple[ParallelConfig, int]:
    match = _HYBRID.fullmatch(piece)
    if match is None or match["first"] == match["second"]:
        _fail(text, piece, "expected (attn:DIMS|ffn:DIMS)")
    sections = {match["first"]: match["a"], match["second"]: match["b"]}
    attn = _dims(text, sections["attn"], "dtpc")
    ffn = _dims(text, sections["ffn"], "dtpe")
    if "p" not in sections["ffn"]:
        ffn["p"] = attn["p"]
    if ffn["p"] != attn["p"]:
        _fail(text, piece, f"attn p{attn['p']} and ffn p{ffn['p']} must be equal")
    world = attn["d"] * attn["t"] * attn["p"] * attn["c"]
    expert = ffn["t"] * ffn["p"] * ffn["e"]
    if world % expert:
        _fail(text, piece, f"ffn t * p * e = {expert} does not divide the attn world of {world}")
    if "d" in sections["ffn"] and ffn["d"] * expert != world:
        _fail(text, piece, f"the ffn world {ffn['d'] * expert} must equal the attn world {world}")
    parallel = ParallelConfig(tp=attn["t"], pp=attn["p"], cp=attn["c"], ep=ffn["e"], etp=ffn["t"])
    return parallel, attn["d"]
