"""Ops on packed tokens: policy_loss.py and advantages.py of megarl/ops.

T tokens in n sequences of one length, the first quarter of each under a False mask.
"""

from collections.abc import Callable

import torch
from timing import Bench, Variant
from torch import Tensor

from megarl.algorithms import advantages as definitions
from megarl.algorithms import losses
from megarl.algorithms.normalization import normalize
from megarl.ops.advantages import gae, normalize_packed
from megarl.ops.policy_loss import policy_loss

_CLIP = 0.2
_GAMMA, _LAMBDA = 0.99, 0.95


def run(bench: Bench) -> None:
    if bench.is_quick:
        shapes = [(8, 64)]
    elif not bench.is_cuda:
        shapes = [(64, 1024)]
    else:
        shapes = [(16, 4096), (256, 4096)]
    for num_sequences, length in shapes:
        case = _Case(bench, num_sequences, length)
        for level in ("token", "sequence"):
            case.policy_loss(level)
        case.gae()
        case.normalize()


class _Case:
    def __init__(self, bench: Bench, num_sequences: int, length: int) -> None:
        self.bench, self.rows = bench, (num_sequences, length)
        size = num_sequences * length
        self.size, self.shape = size, f"{size} tokens, {num_sequences} sequences"
        random = {"device": bench.device, "generator": bench.generator()}
        self.x = -2 * torch.rand(size, **random)
        self.prox = self.x + 0.3 * torch.randn(size, **random)
        self.behaviour = self.prox + 0.1 * torch.randn(size, **random)
        self.advantages, self.values = (torch.randn(size, **random) for _ in range(2))
        columns = torch.arange(length, device=bench.device)
        self.mask = (columns >= length // 4).expand(self.rows).reshape(-1).contiguous()
        self.cu_seqlens = torch.arange(num_sequences + 1, device=bench.device) * length
        self.no_eos = torch.arange(num_sequences, device=bench.device) % 3 == 0
        self.num_tokens = self.mask.sum().float()

    # ------------------------------------------------------------ op 3

    def policy_loss(self, level: str) -> None:
        want = self._exact_gradient(level)

        def measure(grad: object) -> float:
            assert isinstance(grad, Tensor)
            return (grad.double() * self.num_tokens - want).abs().max().item()

        def checked(grad: object) -> float:
            # Ratios of float32 logprobs of a few nats: 1e-6 of themselves, and their products.
            bound = 1e-5 * want.abs().max().item()
            return self.bench.check(f"policy loss of {level}s {self.shape}", measure(grad), bound)

        def body_of(function: Callable[..., losses.LossOutput]) -> Callable[[], Tensor]:
            leaf = self.x.clone().requires_grad_()

            def body() -> Tensor:
                made = function(
                    *(leaf, self.prox, self.behaviour, self.advantages),
                    *(self.mask, self.cu_seqlens),
                    num_tokens=self.num_tokens,
                    eps_clip_low=_CLIP,
                    eps_clip_high=_CLIP,
                    level=level,
                )
                return torch.autograd.grad(made.loss, leaf)[0]

            return body

        variants = [
            Variant("megarl", body_of(policy_loss), measure=checked, is_ours=True),
            Variant("torch, eager", body_of(losses.policy_loss), measure=measure),
        ]
        if self.bench.is_cuda:
            torch._dynamo.reset()
            body = body_of(torch.compile(losses.policy_loss))
            variants.append(Variant("torch.compile", body, measure=measure))
        self.bench.compare(
            *(f"policy loss of {level}s, with gradient", self.shape, variants),
            # logp, proximal, behaviour, advantage, mask in; gradient out, and scaled in autograd.
            gigabytes=self.size * (4 * 4 + 1 + 4 + 8) / 1e9,
            writes=True,
        )

    def _exact_gradient(self, level: str) -> Tensor:
        """N dL/dlogp in float64: -A r w where it is not clipped, 0 under the mask."""
        weight = (self.prox.double() - self.behaviour.double()).exp()
        log_ratio, advantages = self.x.double() - self.prox.double(), self.advantages.double()
        mask = self.mask.double()
        if level == "sequence":
            log_ratio, advantages = self._mean(log_ratio), self._mean(advantages)
        ratio = log_ratio.exp()
        is_clipped = -advantages * ratio.clamp(1 - _CLIP, 1 + _CLIP) > -advantages * ratio
        by_ratio = torch.where(is_clipped, 0.0, -advantages * ratio) * weight * mask
        if level == "sequence":
            # Every token moves the mean that all tokens of its sequence have as their ratio.
            return self._mean(by_ratio) * mask
        return by_ratio

    def _mean(self, x: Tensor) -> Tensor:
        """At each token its sequence's mean over masked tokens."""
        mask = self.mask.view(self.rows).double()
        means = (x.view(self.rows) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return means.expand(self.rows).reshape(-1)

    # ------------------------------------------------------------ op 4

    def gae(self) -> None:
        rows = slice(0, min(8, self.rows[0]))
        want = self._exact_gae(rows)

        def measure(made: object) -> float:
            advantages = made[0] if isinstance(made, tuple) else made
            assert isinstance(advantages, Tensor)
            got = advantages.view(self.rows)[rows].double().cpu()
            return (got - want).abs().max().item()

        def checked(made: object) -> float:
            # Rounded once; a float32 gamma lam would be off by 2^-24 a step, of which 20 count.
            bound = 3e-6 * want.abs().max().item()
            return self.bench.check(f"gae {self.shape}", measure(made), bound)

        def ours() -> tuple[Tensor, Tensor]:
            return gae(
                *(self.advantages, self.values, self.mask, self.cu_seqlens, self.no_eos),
                gamma=_GAMMA,
                lam=_LAMBDA,
            )

        padded = [x.view(self.rows) for x in (self.advantages, self.values, self.mask)]

        def eager() -> tuple[Tensor, Tensor]:
            return definitions.gae(*padded, self.no_eos, gamma=_GAMMA, lam=_LAMBDA)

        self.bench.compare(
            "gae",
            self.shape,
            [
                Variant("megarl", ours, measure=checked, is_ours=True),
                Variant("torch, eager", eager, measure=measure, note="a loop over steps"),
            ],
            gigabytes=self.size * (4 + 4 + 1 + 4 + 4) / 1e9,
            writes=True,
            rounds=5 if self.bench.is_cuda else None,
        )
        if self.bench.is_cuda:
            self.bench.skip("gae", self.shape, "torch.compile", "not tried: unrolls every step")

    def _exact_gae(self, rows: slice) -> Tensor:
        """[rows, S] float64 on the CPU, by the definition's recursion."""
        rewards, values, mask = (
            x.view(self.rows)[rows].cpu() for x in (self.advantages, self.values, self.mask)
        )
        # All sequences end under the mask at the last token: no state comes after it.
        next_value, next_advantage = (torch.zeros(len(mask), dtype=torch.float64) for _ in "ab")
        made = torch.zeros(mask.shape, dtype=torch.float64)
        for t in reversed(range(self.rows[1])):
            value = values[:, t].double()
            here = rewards[:, t].double() + _GAMMA * next_value - value
            here = here + _GAMMA * _LAMBDA * next_advantage
            counts = mask[:, t]
            made[:, t] = torch.where(counts, here, 0.0)
            next_advantage = torch.where(counts, here, next_advantage)
            next_value = torch.where(counts, value, next_value)
        return made

    def normalize(self) -> None:
        """Groups of 4 sequences, mean and standard deviation of each group."""
        groups = self.rows[0] // 4
        ids = torch.arange(self.rows[0], device=self.bench.device) // 4
        x = self.advantages.double().view(groups, -1)
        mask = self.mask.view(groups, -1).double()
        count = mask.sum(1, keepdim=True)
        centred = (x - (x * mask).sum(1, keepdim=True) / count) * mask
        std = (centred.square().sum(1, keepdim=True) / (count - 1)).sqrt()
        want = (centred / (std + 1e-6)).view(-1)
        rules = {"mean_level": "group", "mean_leave1out": False, "std_level": "group"}
        rules |= {"std_unbiased": True, "eps": 1e-6}

        def measure(made: object) -> float:
            assert isinstance(made, Tensor)
            return (made.double() - want).abs().max().item()

        def checked(made: object) -> float:
            bound = 1e-6 * want.abs().max().item()  # sums in float64, one rounding
            return self.bench.check(f"normalize {self.shape}", measure(made), bound)

        def ours() -> Tensor:
            return normalize_packed(
                *(self.advantages, self.mask, self.cu_seqlens, ids, groups), **rules
            )

        of_token = ids.repeat_interleave(self.rows[1])

        def torch_of(function: Callable[..., Tensor]) -> Callable[[], Tensor]:
            return lambda: function(self.advantages, self.mask, of_token, groups, **rules)

        variants = [
            Variant("megarl", ours, measure=checked, is_ours=True),
            Variant("torch, eager", torch_of(normalize), measure=measure),
        ]
        if self.bench.is_cuda:
            torch._dynamo.reset()
            body = torch_of(torch.compile(normalize))
            variants.append(Variant("torch.compile", body, measure=measure))
        self.bench.compare(
            *("normalize by group", self.shape, variants),
            # Read for the mean, for the deviation and to be normalised; then written.
            gigabytes=self.size * (3 * 5 + 4) / 1e9,
            writes=True,
        )
