"""ShardedSender without ranks or servers; with real ones: tests/dist/test_sharded_push.py."""

import pytest

from megarl.bridge.push import Members, Together
from megarl.bridge.sharded import ShardedSender


def test_after_a_failure_all_workers_are_traced_again():
    """A server that was started again, and that nobody saw, knows nothing of the trace before."""
    sender = ShardedSender(
        Members(None), None, Together(None), bucket_bytes=1 << 20, timeout_s=1.0, device="cpu"
    )
    sender._needs["a client"] = ["what its loader takes"]
    assert sender.abandon(1.0) == {}
    assert not sender._needs
    with pytest.raises(RuntimeError, match="prepare"):
        _ = sender.plan
