"""The least time of each op: bytes that it must move, over a bandwidth. Imports nothing."""

VOCABULARY = 151936
SHARDS = {1: VOCABULARY, 2: 76032, 4: 38016, 8: 19072}
"""tp -> columns of a rank, with the vocabulary padded to a multiple of 128 tp."""
_TOKENS = (8192, 16384, 32768, 65536)


def table(read_gbs: float, copy_gbs: float) -> str:
    """Milliseconds for bfloat16 logits: one read; two reads and a write; one read and a write."""
    lines = [
        f"floors in ms, at {read_gbs:.0f} GB/s read and {copy_gbs:.0f} GB/s read + write",
        "logprob, bfloat16: forward (2 B a logit) / with gradient, two passes (6 B) / one (4 B)",
        f"{'tokens':>8}" + "".join(f"{f'tp {tp}: {width}':>26}" for tp, width in SHARDS.items()),
    ]
    for num_tokens in _TOKENS:
        cells = []
        for width in SHARDS.values():
            logits = num_tokens * width / 1e6  # millions, so that / (GB/s) is ms
            times = (2 * logits / read_gbs, 6 * logits / copy_gbs, 4 * logits / copy_gbs)
            cells.append(" / ".join(f"{ms:.3f}" for ms in times))
        lines.append(f"{num_tokens:>8}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)
