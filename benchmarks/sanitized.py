"""Every CUDA kernel once, small and at odd sizes, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python benchmarks/sanitized.py

Values are tested in tests/ops; here they only have to be finite.
"""

import itertools

import torch

from megarl.ops import library
from megarl.ops.advantages import gae, normalize_packed
from megarl.ops.fp8 import quantize_fp8_blocks
from megarl.ops.linear_logprob import linear_logprob_entropy
from megarl.ops.logprob import pack_keep_mask, token_logprob_entropy
from megarl.ops.logprob_loss import logprob_policy_loss
from megarl.ops.pack import Box, PackTable
from megarl.ops.policy_loss import policy_loss

_CLIPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}


def run(device: torch.device) -> int:
    """How many calls were made."""
    return of_logits(device) + of_tokens(device) + of_hidden(device) + of_weights(device)


def of_logits(device: torch.device) -> int:
    calls = 0
    # Under one vector, no multiple of one, several blocks a row.
    for width, dtype in itertools.product((5, 67, 9001), (torch.float32, torch.bfloat16)):
        labels = torch.randint(width - 3, (7,), device=device)
        mask = torch.arange(7, device=device) != 3
        keep = pack_keep_mask(torch.ones(7, width, dtype=torch.bool, device=device))
        for with_keep, with_entropy, in_place in itertools.product((False, True), repeat=3):
            logits = torch.randn(7, width, device=device).to(dtype).requires_grad_()
            logp, entropy = token_logprob_entropy(
                *(logits, labels),
                vocab_size=width - 3,
                mask=mask,
                keep=keep if with_keep else None,
                with_entropy=with_entropy,
                grad_in_place=in_place,
            )
            (logp + entropy).sum().backward()
            check(logits)
            calls += 1
        clusters = (0, 1)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
            clusters = (0, 1, 2, 4, 8)
        for cluster in clusters:
            logits = torch.randn(7, width, device=device).to(dtype).requires_grad_()
            columns = torch.randn(3, 7, device=device)
            result = logprob_policy_loss(
                *(logits, labels, *columns, mask, torch.tensor([0, 4, 7], device=device)),
                vocab_size=width - 3,
                num_tokens=mask.sum(),
                cluster=cluster,
                **_CLIPS,
            )
            (2 * result.loss).backward()
            check(logits)
            calls += 1
    return calls


def of_tokens(device: torch.device) -> int:
    calls = 0
    for ends in ([0, 0], [0, 1], [0, 3, 3, 700, 5003]):
        cu_seqlens = torch.tensor(ends, device=device)
        size, num = ends[-1], len(ends) - 1
        mask = torch.arange(size, device=device) % 5 > 0
        for level in ("token", "sequence"):
            columns = torch.randn(4, size, device=device)
            logp = columns[0].clone().requires_grad_()
            result = policy_loss(
                *(logp, *columns[1:], mask, cu_seqlens),
                num_tokens=mask.sum().clamp(min=1),
                level=level,
                **_CLIPS,
            )
            result.loss.backward()
            check(logp)
        x = torch.randn(2, size, device=device)
        no_eos = torch.arange(num, device=device) % 2 == 0
        assert all(
            made.isfinite().all()
            for made in gae(*x, mask, cu_seqlens, no_eos, gamma=0.99, lam=0.95)
        )
        ids = torch.arange(num, device=device) % 2
        for level in ("group", "batch", "none"):
            made = normalize_packed(
                *(x[0], mask, cu_seqlens, ids, 2),
                mean_level=level,
                mean_leave1out=level == "group",
                std_level=level,
                std_unbiased=True,
                eps=1e-6,
            )
            assert made.isfinite().all()
        calls += 6
    return calls


def of_hidden(device: torch.device) -> int:
    hidden = torch.randn(19, 16, device=device).requires_grad_()
    weight = torch.randn(101, 16, device=device).requires_grad_()
    labels = torch.randint(99, (19,), device=device)
    logp, entropy = linear_logprob_entropy(hidden, weight, labels, vocab_size=99, chunk_tokens=8)
    (logp + entropy).sum().backward()
    check(hidden)
    return 1


def of_weights(device: torch.device) -> int:
    calls = 0
    bf16, fp32 = torch.bfloat16, torch.float32
    # Accesses of 1 to 16 bytes: by where a box begins, and by how wide it is. A tile is 32 KB.
    extents = [(0, 16), (1, 16), (2, 16), (4, 16), (8, 24), (0, 12), (0, 48), (5, 48)]
    for dtype, in_bucket in ((torch.uint8, torch.uint8), (bf16, bf16), (fp32, bf16), (bf16, fp32)):
        tensors = [torch.ones(n, 48, device=device).to(dtype) for n in (1, 3, 701)]
        boxes = [
            Box(x, columns=extent, dtype=in_bucket)
            for x, extent in itertools.product(tensors, extents)
        ]
        boxes += [
            Box(torch.ones(n, device=device).to(dtype), dtype=in_bucket) for n in (1, 37, 40003)
        ]
        # One table at a time that is unpacked: these boxes overlap in their tensors.
        for some in (boxes, *([box] for box in boxes)):
            table = PackTable(some)
            bucket = torch.zeros(table.num_bytes, dtype=torch.uint8, device=device)
            table.pack(bucket)
            calls += 1
            if len(some) == 1:
                table.unpack(bucket)
                calls += 1
                assert (some[0].tensor == 1).all()
    # By vectors, at the edge of blocks too, and by elements.
    for shape, dtype in itertools.product(((1, 1), (130, 200), (129, 131)), (bf16, fp32)):
        codes, scales = quantize_fp8_blocks(torch.randn(shape, device=device).to(dtype))
        assert codes.float().isfinite().all()
        assert scales.isfinite().all()
        calls += 1
    return calls


def check(leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


if __name__ == "__main__":
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert library.sources()[on.type] == "kernel", "python -m megarl.ops.build"
    print(run(on), "calls on", on)
    if on.type == "cuda":
        torch.cuda.synchronize()
