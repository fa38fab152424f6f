"""Policy loss and its gradient from one read of the logits: megarl/ops/logprob_loss.py."""

from collections.abc import Callable

import peers
import torch
from floors import VOCABULARY
from logprob import rows_to_check, take
from timing import Bench, Variant
from torch import Tensor

from megarl.ops.logprob import token_logprob_entropy
from megarl.ops.logprob_loss import logprob_policy_loss

_CLIP = 0.2


def run(bench: Bench) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    if bench.is_quick:
        shapes = [(64, 4001, fp32), (64, 4000, bf16)]
    elif not bench.is_cuda:
        shapes = [(512, VOCABULARY, bf16)]
    else:
        shapes = [(n, VOCABULARY, bf16) for n in (8192, 16384, 32768, 65536)]
    for num_tokens, width, dtype in shapes:
        if bench.is_late():
            bench.skip("loss", f"[{num_tokens}, {width}]", "megarl", "skipped: no time left")
        else:
            _Case(bench, num_tokens, width, dtype).run()


class _Case:
    """PPO's clipped loss of one packed sequence; about half of the tokens are clipped."""

    def __init__(self, bench: Bench, num_tokens: int, width: int, dtype: torch.dtype) -> None:
        self.bench, self.width = bench, width
        self.shape = f"[{num_tokens}, {width}] {dtype}".replace("torch.", "")
        random = {"device": bench.device, "generator": bench.generator()}
        self.logits = torch.empty(num_tokens, width, dtype=dtype, device=bench.device)
        self.logits.normal_(0.0, 3.0, generator=random["generator"])
        self.labels = torch.randint(width, (num_tokens,), **random)
        with torch.no_grad():
            logp, _ = token_logprob_entropy(self.logits, self.labels, vocab_size=width)
        self.prox = logp + 0.3 * torch.randn(num_tokens, **random)
        self.advantages = torch.randn(num_tokens, **random)
        self.mask = torch.ones(num_tokens, dtype=torch.bool, device=bench.device)
        self.cu_seqlens = torch.tensor([0, num_tokens], device=bench.device)
        self.num_tokens = torch.tensor(float(num_tokens), device=bench.device)
        self.work = torch.empty_like(self.logits).requires_grad_()
        self.rows = rows_to_check(num_tokens)
        self.want = self._exact()

    def _exact(self) -> Tensor:
        """N dloss/dlogits of some rows, in float64: -A r (1[label] - p) where it is not clipped."""
        logp_all = torch.log_softmax(take(self.logits, self.rows).double(), dim=-1)
        labels = self.labels[self.rows, None]
        ratio = (logp_all.gather(1, labels)[:, 0] - self.prox[self.rows].double()).exp()
        advantages = self.advantages[self.rows].double()
        is_clipped = -advantages * ratio.clamp(1 - _CLIP, 1 + _CLIP) > -advantages * ratio
        weight = torch.where(is_clipped, 0.0, -advantages * ratio)[:, None]
        one_hot = torch.zeros_like(logp_all).scatter_(1, labels, 1.0)
        return weight * (one_hot - logp_all.exp())

    def run(self) -> None:
        variants = [
            Variant("megarl, one pass", self._one_pass(0), self._restore, self._checked, True),
            Variant("megarl, two passes", self._two_passes, self._restore, self._checked, True),
        ]
        if self.bench.is_cuda and torch.cuda.get_device_capability() >= (9, 0):
            variants += [
                Variant(
                    f"megarl, cluster {n}", self._one_pass(n), self._restore, self._checked, True
                )
                for n in (1, 2, 4, 8)
            ]
        if len(self.labels) <= 8192:
            variants.append(
                Variant("torch, .float()", self._torch(peers.eager), self._restore, self._measure)
            )
        if len(self.labels) <= 8192 and self.bench.is_cuda:
            body = self._torch(peers.compiled())
            variants.append(Variant("torch.compile", body, self._restore, self._measure))
        self.bench.compare(
            *("policy loss with gradient", self.shape, variants),
            gigabytes=2 * self.logits.nbytes / 1e9,
            writes=True,
            largest_bytes=self.logits.nbytes,
        )

    def _restore(self) -> None:
        with torch.no_grad():
            self.work.copy_(self.logits)

    def _measure(self, grad: object) -> float:
        """Largest difference of N dloss/dlogits."""
        assert isinstance(grad, Tensor)
        made = take(grad, self.rows).double() * len(self.labels)
        return (made - self.want).abs().max().item()

    def _checked(self, grad: object) -> float:
        # Rounding to the logits' dtype of the largest element; a ratio is known to 1e-5.
        largest = self.want.abs().max().item()
        unit = 2**-8 if self.logits.dtype == torch.bfloat16 else 3e-5
        bound = unit * largest + 1e-6
        return self.bench.check(f"policy loss {self.shape}", self._measure(grad), bound)

    def _one_pass(self, cluster: int) -> Callable[[], Tensor]:
        def body() -> Tensor:
            result = logprob_policy_loss(
                *(self.work, self.labels, self.prox, self.prox, self.advantages, self.mask),
                self.cu_seqlens,
                vocab_size=self.width,
                num_tokens=self.num_tokens,
                eps_clip_low=_CLIP,
                eps_clip_high=_CLIP,
                decoupled=False,
                cluster=cluster,
            )
            return torch.autograd.grad(result.loss, self.work)[0]

        return body

    def _clipped(self, logp: Tensor) -> Tensor:
        ratio = (logp - self.prox).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        return torch.maximum(-self.advantages * ratio, -self.advantages * clipped).mean()

    def _two_passes(self) -> Tensor:
        logp, _ = token_logprob_entropy(
            self.work, self.labels, vocab_size=self.width, grad_in_place=True
        )
        return torch.autograd.grad(self._clipped(logp), self.work)[0]

    def _torch(self, values: Callable[..., tuple[Tensor, ...]]) -> Callable[[], Tensor]:
        def body() -> Tensor:
            logp, _ = values(self.work, self.labels, True)
            return torch.autograd.grad(self._clipped(logp), self.work)[0]

        return body
