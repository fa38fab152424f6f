"""Op 1, token logprob and entropy of given logits: megarl/ops/logprob.py."""

from collections.abc import Callable, Iterator

import peers
import torch
from floors import SHARDS, VOCABULARY
from timing import Bench, Variant
from torch import Tensor

from megarl.ops.logprob import token_logprob_entropy

_CHECKED_ROWS = 8


def cases(bench: Bench) -> Iterator[tuple[int, int, torch.dtype, bool]]:
    """Tokens, columns, dtype, and whether peers are timed too."""
    bf16, fp32 = torch.bfloat16, torch.float32
    if bench.is_quick:
        yield from ((64, 4001, fp32, True), (64, 4000, bf16, True))
    elif not bench.is_cuda:
        yield from ((2048, VOCABULARY, fp32, True), (2048, VOCABULARY, bf16, True))
    else:
        yield from ((8192, width, bf16, width in (VOCABULARY, 19072)) for width in SHARDS.values())
        yield (8192, VOCABULARY, fp32, False)
        # Peers take minutes to compile, and several float32 copies of the logits.
        for num_tokens in (16384, 32768, 65536):
            yield from ((num_tokens, width, bf16, False) for width in SHARDS.values())


def run(bench: Bench) -> None:
    if bench.is_cuda and peers.is_installed("megatron.core"):
        peers.start_one_rank(bench.device)
    for num_tokens, width, dtype, with_peers in cases(bench):
        if bench.is_late():
            bench.skip("logprob", f"[{num_tokens}, {width}]", "megarl", "skipped: no time left")
            continue
        logits = torch.empty(num_tokens, width, dtype=dtype, device=bench.device)
        logits.normal_(0.0, 3.0, generator=bench.generator())
        labels = torch.randint(
            width, (num_tokens,), device=bench.device, generator=bench.generator(1)
        )
        for with_entropy in (False, True):
            _forward(bench, logits, labels, with_entropy, with_peers)
        for with_entropy in (False, True):
            _both(bench, logits, labels, with_entropy, with_peers)


def exact(logits: Tensor, labels: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and the gradient of their sum, in float64."""
    leaf = logits.double().requires_grad_()
    logp_all = torch.log_softmax(leaf, dim=-1)
    logp = logp_all.gather(1, labels[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(dim=-1)
    total = (logp + entropy).sum() if with_entropy else logp.sum()
    (grad,) = torch.autograd.grad(total, leaf)
    return logp.detach(), entropy.detach(), grad


def rows_to_check(num_tokens: int) -> list[int]:
    step = (num_tokens - 1) / (_CHECKED_ROWS - 1)
    return [round(i * step) for i in range(_CHECKED_ROWS)]


def take(x: Tensor, rows: list[int]) -> Tensor:
    """x[rows], by slices: x may have more elements than an index of 32 bits."""
    return torch.stack([x[i] for i in rows])


def _name(what: str, with_entropy: bool) -> str:
    return f"{what}: logp + entropy" if with_entropy else f"{what}: logp"


def _shape(logits: Tensor) -> str:
    return f"{list(logits.shape)} {str(logits.dtype).removeprefix('torch.')}"


def _peers(logits: Tensor, with_entropy: bool) -> dict[str, Callable[..., object] | str]:
    """Name -> (logits, labels) -> logp or (logp, entropy); or why it is not here."""
    found: dict[str, Callable[..., object] | str] = {
        "torch, .float()": lambda x, y: peers.eager(x, y, with_entropy)
    }
    if logits.dtype == torch.bfloat16:
        found["torch, in bfloat16"] = lambda x, y: peers.eager_native(x, y, with_entropy)
    if not logits.is_cuda:
        return found
    compiled = peers.compiled()
    found["torch.compile"] = lambda x, y: compiled(x, y, with_entropy)
    if with_entropy:
        return found
    found["Megatron-Core"] = peers.megatron
    found["Megatron-Core, fused"] = peers.megatron_fused
    is_liger = peers.is_installed("liger_kernel")
    found["Liger-Kernel"] = peers.liger if is_liger else peers.NOT_INSTALLED
    found["Liger, vocab-parallel"] = peers.liger_vocab_parallel if is_liger else peers.NOT_INSTALLED
    return found


def _ours(logits: Tensor, labels: Tensor, with_entropy: bool, in_place: bool = False) -> object:
    logp, entropy = token_logprob_entropy(
        *(logits, labels),
        vocab_size=logits.shape[1],
        with_entropy=with_entropy,
        grad_in_place=in_place,
    )
    return (logp, entropy) if with_entropy else (logp,)


def _error(results: object, wants: tuple[Tensor, ...], rows: list[int]) -> float:
    """Largest difference; `rows` of `results` against all of the float64 ones."""
    made = results if isinstance(results, tuple) else (results,)
    errors = [
        (take(x.detach(), rows).double() - y).abs().max() for x, y in zip(made, wants, strict=False)
    ]
    return torch.stack(errors).max().item()


def _forward(
    bench: Bench, logits: Tensor, labels: Tensor, with_entropy: bool, with_peers: bool
) -> None:
    rows = rows_to_check(len(labels))
    logp, entropy, _ = exact(take(logits, rows), take(labels, rows), with_entropy)
    # As in tests/ops: a logit x is known to 2^-24 |x| in float32.
    bound = 1e-5 + 2**-22 * take(logits, rows).abs().max().item()

    def measure(results: object) -> float:
        return _error(results, (logp, entropy), rows)

    def checked(results: object) -> float:
        return bench.check(f"logprob forward {_shape(logits)}", measure(results), bound)

    @torch.no_grad()
    def ours() -> object:
        return _ours(logits, labels, with_entropy)

    variants = [Variant("megarl", ours, measure=checked, is_ours=True)]
    for name, peer in (_peers(logits, with_entropy) if with_peers else {}).items():
        if isinstance(peer, str):
            bench.skip(_name("forward", with_entropy), _shape(logits), name, peer)
            continue

        @torch.no_grad()
        def body(peer: Callable[..., object] = peer) -> object:
            return peer(logits, labels)

        variants.append(Variant(name, body, measure=measure))
    bench.compare(
        *(_name("forward", with_entropy), _shape(logits), variants),
        gigabytes=logits.nbytes / 1e9,
        largest_bytes=logits.nbytes,
    )
    checked(ours())  # no peer has written over the logits


def _both(
    bench: Bench, logits: Tensor, labels: Tensor, with_entropy: bool, with_peers: bool
) -> None:
    """Forward and gradient, with ones as the gradient of the results."""
    rows = rows_to_check(len(labels))
    *_, want = exact(take(logits, rows), take(labels, rows), with_entropy)
    ones = torch.ones(len(labels), device=bench.device)
    work = torch.empty_like(logits).requires_grad_()

    def restore() -> None:
        with torch.no_grad():
            work.copy_(logits)

    def gradient(results: object) -> Tensor:
        made = results if isinstance(results, tuple) else (results,)
        (grad,) = torch.autograd.grad(made, work, [ones.to(x.dtype) for x in made])
        return grad

    def ours(in_place: bool) -> Tensor:
        return gradient(_ours(work, labels, with_entropy, in_place))

    def measure(grad: object) -> float:
        return _error(grad, (want,), rows)

    # Rounding to the logits' dtype, and what is left where 1 - p cancels (tests/ops).
    relative = 2**-8 if logits.dtype == torch.bfloat16 else 1e-5
    absolute = 1e-6 * (1 + 10 * with_entropy * (1 + take(logits, rows).abs().max().item()))

    def checked(grad: Tensor) -> float:
        over = ((take(grad, rows).double() - want).abs() - relative * want.abs()).max().item()
        bench.check(f"logprob gradient {_shape(logits)}", over, absolute)
        return measure(grad)

    variants = [
        Variant(
            f"megarl{', gradient over the logits' if in_place else ''}",
            lambda in_place=in_place: ours(in_place),
            prepare=restore,
            measure=checked,
            is_ours=True,
        )
        for in_place in (True, False)
    ]
    for name, peer in (_peers(logits, with_entropy) if with_peers else {}).items():
        if isinstance(peer, str):
            bench.skip(_name("with gradient", with_entropy), _shape(logits), name, peer)
            continue

        # A view, since some write over what they are given and a leaf does not allow it.
        def body(peer: Callable[..., object] = peer) -> Tensor:
            return gradient(peer(work.view_as(work), labels))

        variants.append(Variant(name, body, prepare=restore, measure=measure))
    bench.compare(
        *(_name("with gradient", with_entropy), _shape(logits), variants),
        gigabytes=3 * logits.nbytes / 1e9,
        writes=True,
        largest_bytes=logits.nbytes,
        rounds=None if bench.is_cuda or bench.is_quick else 3,
    )
