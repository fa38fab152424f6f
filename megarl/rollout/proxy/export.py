"""What a session sampled, as a trajectory (see megarl.trajectory).

    turns    a row for each completion: its prompt and its answer
    concat   a row for each conversation, that is each completion no other goes on from: every
             answer on the way to it is trained, what lies between is given

Rewards go back over the session's requests in the order they were answered. With r_c the
reward set for completion c (0 if none is), T the turn of c and gamma the turn discount:

    R_c = r_c + gamma * mean(R_d for d of turn T + 1)

so one reward r at the end is worth r * gamma^(turns after) to each turn. A conversation is
worth what its first answer is, had its own answers been the only ones of their turns.
"""

from typing import Literal

import torch

from megarl.rollout.proxy.session import Completion, Session
from megarl.trajectory import Trajectory, concat_padded

ExportStyle = Literal["turns", "concat"]


def export(session: Session, style: ExportStyle = "turns", gamma: float = 1.0) -> Trajectory | None:
    """Rows in the order of sampling; None if nothing was sampled.

    Args:
      gamma: turn discount, in [0, 1].

    Raises:
      ValueError: gamma is outside of [0, 1], or there is no such style.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"the turn discount must be in [0, 1], got {gamma}")
    if style not in ("turns", "concat"):
        raise ValueError(f"export style must be turns or concat, got {style!r}")
    returns = turn_returns(session.completions, gamma)
    rows = []
    for completion in session.completions:
        if style == "turns":
            rows.append(_row([completion], returns[completion]))
        elif not completion.has_child:
            path = _path(completion)
            rows.append(_row(path, _path_return(path, returns, gamma)))
    return concat_padded(rows) if rows else None


def export_run(session: Session, style: ExportStyle) -> Trajectory:
    """One row for all of it, the last completion's: for an evaluation, to which a run is a sample.

    Its reward is R of the first turn without a discount: the sum of what was set, if no turn has
    several choices. Something was sampled.
    """
    returns = turn_returns(session.completions, 1.0)
    first = min(c.turn for c in session.completions)
    worth = [returns[c] for c in session.completions if c.turn == first]
    last = session.completions[-1]
    trained = _path(last) if style == "concat" else [last]
    return _row(trained, sum(worth) / len(worth))


def turn_returns(completions: list[Completion], gamma: float) -> dict[Completion, float]:
    """R of each completion; see the module."""
    turns: dict[int, list[Completion]] = {}
    for completion in completions:
        turns.setdefault(completion.turn, []).append(completion)
    returns: dict[Completion, float] = {}
    later = 0.0
    for turn in sorted(turns, reverse=True):
        for completion in turns[turn]:
            returns[completion] = (completion.reward or 0.0) + gamma * later
        later = sum(returns[c] for c in turns[turn]) / len(turns[turn])
    return returns


def _path(leaf: Completion) -> list[Completion]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _path_return(path: list[Completion], returns: dict[Completion, float], gamma: float) -> float:
    worth = returns[path[-1]]
    for before, after in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
        worth = (before.reward or 0.0) + float(gamma ** (after.turn - before.turn)) * worth
    return worth


def _row(trained: list[Completion], reward: float) -> Trajectory:
    """[1, S] columns of the last of `trained`; each begins with the tokens of the one before."""
    tokens = trained[-1].tokens
    loss_mask, versions = [0] * len(tokens), [-1] * len(tokens)
    logprobs = [0.0] * len(tokens)
    for completion in trained:
        response = completion.response
        answer = slice(response.input_len, response.input_len + response.output_len)
        assert tokens[answer] == response.output_tokens, "a prompt begins with what was sampled"
        loss_mask[answer] = [1] * response.output_len
        logprobs[answer] = response.output_logprobs
        versions[answer] = response.output_versions
    return {
        "input_ids": torch.tensor([tokens], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
        "loss_mask": torch.tensor([loss_mask], dtype=torch.int32),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int32),
        "rewards": torch.tensor([float(reward)]),
        "no_eos": torch.tensor([trained[-1].response.stop_reason == "length"]),
    }
