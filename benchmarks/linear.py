"""Op 2, output layer and token logprobs in one: megarl/ops/linear_logprob.py."""

from collections.abc import Callable

import peers
import torch
from floors import VOCABULARY
from logprob import rows_to_check, take
from timing import Bench, Variant
from torch import Tensor

from megarl.ops.linear_logprob import linear_logprob_entropy, linear_logprob_loss

Gradients = tuple[Tensor, ...]


def run(bench: Bench) -> None:
    if bench.is_quick or not bench.is_cuda:
        shapes = [(48, 64, 1003)] if bench.is_quick else [(256, 1024, 16384)]
        dtypes = (torch.float32, torch.bfloat16)
    else:
        shapes = [(8192, 2048, VOCABULARY), (8192, 4096, VOCABULARY)]
        dtypes = (torch.bfloat16,)
    for num_tokens, hidden_size, width in shapes:
        for dtype in dtypes:
            _Case(bench, num_tokens, hidden_size, width, dtype).run()


class _Case:
    """One shape. Weights are scaled so that logits have a spread of about 3."""

    def __init__(
        self, bench: Bench, num_tokens: int, hidden_size: int, width: int, dtype: torch.dtype
    ) -> None:
        self.bench, self.width, self.dtype = bench, width, dtype
        self.shape = f"T {num_tokens}, H {hidden_size}, V {width}, {dtype}".replace("torch.", "")
        random = {"device": bench.device, "generator": bench.generator()}
        self.hidden = torch.randn(num_tokens, hidden_size, **random).to(dtype).requires_grad_()
        scale = 3 / hidden_size**0.5
        weight = torch.randn(width, hidden_size, **random) * scale
        self.weight = weight.to(dtype).requires_grad_()
        self.labels = torch.randint(width, (num_tokens,), **random)
        self.ones = torch.ones(num_tokens, device=bench.device)
        self.rows = rows_to_check(num_tokens)
        self._exact()

    def _exact(self) -> None:
        """Of some rows in float64: logp, entropy, and the gradient of sum(-logp) for hidden."""
        hidden = self.hidden.detach()[self.rows].double().requires_grad_()
        logits = hidden @ self.weight.detach().double().t()
        logp_all = torch.log_softmax(logits, dim=-1)
        logp = logp_all.gather(1, self.labels[self.rows, None])[:, 0]
        self.logp = logp.detach()
        self.entropy = -(logp_all.exp() * logp_all).sum(dim=-1).detach()
        (self.hidden_grad,) = torch.autograd.grad(-logp.sum(), hidden)
        # Logits are rounded to their dtype, and a float32 sum of H products to about 2^-18.
        unit = 2**-8 if self.dtype == torch.bfloat16 else 2**-18
        largest = logits.detach().abs().max().item()
        self.logit_bound = 1e-5 + 2 * unit * largest
        # p has the relative error of a logit, so the gradient has it of |p| |w|; and it is
        # rounded itself. The sum over V of independent errors stays under the largest gradient.
        self.grad_bound = 4 * unit * (1 + largest) * self.hidden_grad.abs().max().item() + 1e-6

    def run(self) -> None:
        num_tokens, hidden_size = self.hidden.shape
        logits_bytes = num_tokens * self.width * self.hidden.element_size()
        one_product = 2e-12 * num_tokens * hidden_size * self.width
        self.bench.compare(
            "linear forward: logp + entropy",
            self.shape,
            [*self._ours_forward(), *self._peers_forward()],
            teraflop=one_product,
            largest_bytes=logits_bytes,
        )
        self.bench.compare(
            "linear with gradient",
            self.shape,
            [*self._ours_both(), *self._peers_both()],
            teraflop=3 * one_product,
            largest_bytes=logits_bytes,
        )

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.labels

    def _measure_values(self, results: object) -> float:
        made = results if isinstance(results, tuple) else (results,)
        wants = (self.logp, self.entropy)
        errors = [
            (take(x.detach(), self.rows).double() - want).abs().max()
            for x, want in zip(made, wants, strict=False)
        ]
        return torch.stack(errors).max().item()

    def _check_values(self, results: object) -> float:
        error = self._measure_values(results)
        return self.bench.check(f"linear forward {self.shape}", error, self.logit_bound)

    def _measure_grad(self, grads: object) -> float:
        assert isinstance(grads, tuple)
        return (take(grads[0], self.rows).double() - self.hidden_grad).abs().max().item()

    def _check_grad(self, grads: object) -> float:
        error = self._measure_grad(grads)
        return self.bench.check(f"linear gradient {self.shape}", error, self.grad_bound)

    def _ours_forward(self) -> list[Variant]:
        @torch.no_grad()
        def ours() -> tuple[Tensor, Tensor]:
            return linear_logprob_entropy(*self._arguments(), vocab_size=self.width)

        return [Variant("megarl", ours, measure=self._check_values, is_ours=True)]

    def _peers_forward(self) -> list[Variant]:
        @torch.no_grad()
        def product() -> Tensor:
            return self.hidden @ self.weight.t()

        @torch.no_grad()
        def torch_of_all() -> tuple[Tensor, ...]:
            return peers.eager(product(), self.labels, True)

        variants = [
            Variant("torch.mm and torch, .float()", torch_of_all, measure=self._measure_values),
            Variant("torch.mm alone", product, note="the product, no logprobs"),
        ]
        if self._has("cut_cross_entropy", "forward: logp + entropy"):
            values = torch.no_grad()(lambda: -peers.cut_cross_entropy(*self._arguments()))
            measure = self._measure_values
            variants.append(
                Variant("cut-cross-entropy", values, measure=measure, note="no entropy")
            )
        return variants

    def _has(self, module: str, what: str) -> bool:
        """Whether a peer is timed; says so where it is not."""
        if not self.bench.is_cuda:
            return False
        if peers.is_installed(module):
            return True
        self.bench.skip(f"linear {what}", self.shape, module, peers.NOT_INSTALLED)
        return False

    def _grads(self, loss: Tensor) -> Gradients:
        return torch.autograd.grad(loss, (self.hidden, self.weight))

    def _ours_both(self) -> list[Variant]:
        def recomputing() -> Gradients:
            logp, _ = linear_logprob_entropy(
                *self._arguments(), vocab_size=self.width, with_entropy=False
            )
            return self._grads(-logp.sum())

        def negative_logp(
            logp: Tensor, entropy: Tensor, rows: slice
        ) -> tuple[Tensor, Tensor, None]:
            return -logp.sum(), -self.ones[rows], None

        def in_forward() -> Gradients:
            loss, _, _ = linear_logprob_loss(
                *(*self._arguments(), negative_logp), vocab_size=self.width, with_entropy=False
            )
            return self._grads(loss)

        both: list[tuple[str, Callable[[], Gradients]]] = [
            ("megarl, gradient in forward", in_forward),
            ("megarl, recomputing", recomputing),
        ]
        return [Variant(name, body, measure=self._check_grad, is_ours=True) for name, body in both]

    def _peers_both(self) -> list[Variant]:
        hidden, weight = self.hidden.detach(), self.weight.detach()
        logits = torch.empty(len(hidden), self.width, dtype=self.dtype, device=hidden.device)
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.empty_like(weight)

        def products() -> None:
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(logits, weight, out=hidden_grad)
            torch.mm(logits.t(), hidden, out=weight_grad)

        def torch_of_all() -> Gradients:
            (logp,) = peers.eager(self.hidden @ self.weight.t(), self.labels, False)
            return self._grads(-logp.sum())

        measure = self._measure_grad
        variants = [
            Variant("three torch.mm alone", products, note="the products, no logprobs"),
            Variant("torch.mm and torch, .float()", torch_of_all, measure=measure),
        ]
        if self._has("liger_kernel", "with gradient"):
            body = lambda: self._grads(peers.liger_linear(*self._arguments()))  # noqa: E731
            variants.append(Variant("Liger-Kernel", body, measure=measure))
        if self._has("cut_cross_entropy", "with gradient"):
            body = lambda: self._grads(peers.cut_cross_entropy(*self._arguments()).sum())  # noqa: E731
            variants.append(Variant("cut-cross-entropy", body, measure=measure))
        return variants
