"""Which server a request goes to."""

import random

from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.router import BLOCK_TOKENS, Router

COST = 100.0


def tokens(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(150_000) for _ in range(count)]


def test_a_new_request_goes_to_the_least_outstanding_tokens():
    router = Router()
    assert router.choose("r0", [1], COST, {"a": 500.0, "b": 100.0, "c": 300.0}) == "b"


def test_requests_of_one_id_share_a_server_until_it_is_too_busy():
    router = Router()
    loads = {"a": 0.0, "b": 0.0, "c": 0.0}
    asked = []
    for _ in range(24):
        server = router.choose("group", [1, 2, 3], COST, loads)
        loads[server] += COST
        asked.append(server)
    assert asked[:8] == ["a"] * 8
    assert set(asked) == {"a", "b", "c"}
    assert max(loads.values()) <= 1.5 * min(loads.values()) + 9 * COST
    # Its home is still the first.
    assert router.choose("group", [1, 2, 3], COST, dict.fromkeys("abc", 0.0)) == "a"


def test_a_request_that_goes_on_returns_to_its_cache_whatever_its_id():
    router = Router()
    said = tokens(0, 3 * BLOCK_TOKENS + 17)
    router.learn("b", said)
    loads = {"a": 0.0, "b": 5 * COST}
    assert router.choose("another", [*said, 7, 8, 9], COST, loads) == "b"
    assert router.choose("another", [*said, 7, 8, 9], COST, {"a": 0.0}) == "a"
    assert router.choose("a stranger", tokens(1, len(said)), COST, loads) == "a"


def test_the_longest_beginning_decides():
    router = Router()
    shared, rest = tokens(0, 2 * BLOCK_TOKENS), tokens(1, 4 * BLOCK_TOKENS)
    router.learn("a", shared)
    router.learn("b", shared + rest)
    router.learn("a", shared)  # a later request of another kind
    loads = {"a": 0.0, "b": COST}
    assert router.choose("r", shared + rest, COST, loads) == "b"


def test_a_short_common_beginning_does_not_bind():
    """A system prompt that all requests begin with must not send all of them to one server."""
    router = Router()
    system = tokens(0, BLOCK_TOKENS)
    router.learn("b", system)
    long = system + tokens(1, 2 * BLOCK_TOKENS)
    assert router.choose("r", long, COST, {"a": 0.0, "b": COST}) == "a"


def test_a_server_that_is_gone_is_forgotten():
    router = Router()
    said = tokens(0, 2 * BLOCK_TOKENS)
    router.learn("a", said)
    assert router.choose("r", said, COST, {"a": 0.0, "b": 0.0}) == "a"
    router.forget("a")
    loads = {"a": COST, "b": 0.0}
    assert router.choose("r", said, COST, loads) == "b"


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 900)), max_size=60),
    st.integers(1, 5),
)
def test_no_server_is_left_far_behind(requests, num_servers):
    """Whatever is shared, the busiest has at most 1.5 times the least, and 9 of the largest."""
    router, loads = Router(), dict.fromkeys(range(num_servers), 0.0)
    most = 0.0
    for rid, seed, count in requests:
        cost = float(count)
        most = max(most, cost)
        server = router.choose(f"r{rid}", tokens(seed, count), cost, loads)
        router.learn(server, tokens(seed, count))
        loads[server] += cost
        assert loads[server] <= 1.5 * min(loads.values()) + 9 * most
