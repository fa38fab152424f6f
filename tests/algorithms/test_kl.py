"""KL estimators: unbiased where they say so, with the gradient they say."""

import pytest
import torch

from megarl.algorithms.kl import kl_estimate


def distributions():
    g = torch.Generator().manual_seed(0)
    p, q = torch.log_softmax(torch.randn(2, 7, generator=g, dtype=torch.float64), dim=-1)
    return p, q


def expectation(kind):
    """sum_x p(x) k(x): the estimator's exact expectation over the 7 tokens."""
    p, q = distributions()
    return (p.exp() * kl_estimate(p, q, kind)).sum()


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    p, q = distributions()
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close(expectation(kind), exact, rtol=1e-5, atol=1e-6)  # float32 inside
    assert (expectation("k2") - exact).abs() > 1e-3


def test_k2_and_k3_are_never_negative():
    p, q = distributions()
    assert (kl_estimate(p, q, "k2") >= 0).all()
    assert (kl_estimate(p, q, "k3") >= 0).all()
    assert (kl_estimate(p, q, "k1") < 0).any()


@pytest.mark.parametrize(("kind", "direction"), [("k2", "forward"), ("k3", "reverse")])
def test_expected_gradient_as_a_loss(kind, direction):
    """E_p[grad k] with respect to p's logits equals the gradient of the KL it names."""
    p, q = distributions()

    def gradient_of(loss):
        logits = p.clone().requires_grad_()
        loss(torch.log_softmax(logits, dim=-1)).backward()
        return logits.grad

    sampled = gradient_of(lambda lp: (p.exp() * kl_estimate(lp, q, kind)).sum())
    if direction == "forward":
        exact = gradient_of(lambda lp: (lp.exp() * (lp - q)).sum())
    else:
        exact = gradient_of(lambda lp: (q.exp() * (q - lp)).sum())
    torch.testing.assert_close(sampled, exact, rtol=1e-4, atol=1e-6)  # float32 inside


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_token_far_apart_has_the_bound_and_no_gradient(kind):
    # exp(200) is inf in float32, and 0 * inf in the backward pass would be nan.
    logp = torch.tensor([-200.0, -1.0, -torch.inf], requires_grad=True)
    value = kl_estimate(logp, torch.tensor([-0.5, -0.5, -0.5]), kind)
    value.nan_to_num(0.0).sum().backward()
    assert value.abs().tolist()[::2] == [10.0, 10.0]
    assert logp.grad[0].item() == 0.0
    assert logp.grad[1].item() != 0.0


def test_bounds_and_errors():
    far = kl_estimate(torch.tensor([0.0]), torch.tensor([-50.0]), "k1")
    assert far.item() == 10.0
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(torch.zeros(1), torch.zeros(2), "k1")
