"""Routing decisions against hand-computed values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import TopKRouter
from moe_core.routing import count_load, rerouted_assignments

nan, inf = math.nan, math.inf


def route(logits, top_k, bias=None, mask=None, **options):
    logits = torch.tensor(logits, dtype=torch.float32)
    router = TopKRouter(4, logits.shape[-1], top_k, **options)
    bias = None if bias is None else torch.tensor(bias)
    mask = None if mask is None else torch.tensor(mask)
    return router.route_logits(logits, bias, mask)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"renormalize": False}, [0.6652, 0.2447]),
        ({"renormalize": True}, [0.7311, 0.2689]),
        ({"softmax_after_top_k": True}, [0.7311, 0.2689]),
        ({"renormalize": True, "routed_scaling_factor": 2.5}, [1.8276, 0.6724]),
    ],
)
def test_softmax_before_and_after_top_k(options, weights):
    routing = route([[1.0, 0.0, -1.0]], 2, **options)
    assert routing.expert_ids_TK.tolist() == [[0, 1]]
    assert routing.weights_TK[0].tolist() == pytest.approx(weights, abs=1e-4)


def test_c17_bias_moves_the_choice_and_not_the_weights():
    logits = torch.logit(torch.tensor([[0.6, 0.5, 0.4]])).tolist()
    routing = route(logits, 2, bias=[0.0, 0.0, 0.3], score_function="sigmoid")
    assert routing.expert_ids_TK.tolist() == [[2, 0]]  # corrected .7, .6, .5
    assert routing.weights_TK[0].tolist() == pytest.approx([0.4, 0.6], abs=1e-6)
    assert routing.threshold_T.item() == pytest.approx(0.5)
    assert rerouted_assignments(routing) == 1  # expert 2 in place of expert 1


def test_no_bias_means_no_rerouting_figure():
    assert rerouted_assignments(route([[1.0, 0.0]], 1)) is None


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_c22_invalid_rows_are_set_apart(score_function):
    good = [0.1, 0.9, -0.3, 2.0, 0.0, 0.5, -1.0, 0.2]
    single_nan = [*good[:3], nan, *good[4:]]
    rows = [good, [nan] * 8, single_nan, [-inf] * 8, [inf, *good[1:]], [1.0] + [-inf] * 7, good]
    routing = route(rows, 2, score_function=score_function)
    assert routing.invalid_T.tolist() == [False, True, True, True, True, True, False]
    assert routing.expert_ids_TK[1:6].eq(-1).all()
    assert routing.weights_TK[1:6].eq(0).all()
    alone = route([good], 2, score_function=score_function)
    for row in (0, 6):
        assert torch.equal(routing.expert_ids_TK[row], alone.expert_ids_TK[0])
        assert torch.equal(routing.weights_TK[row], alone.weights_TK[0])
    assert routing.load().tolist() == [0, 2, 0, 2, 0, 0, 0, 0]


def test_impossible_experts_are_never_chosen_even_with_a_bias():
    routing = route([[-inf, 1.0, 0.5]], 2, bias=[100.0, 0.0, 0.0], score_function="sigmoid")
    assert routing.expert_ids_TK.tolist() == [[1, 2]]


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 8)])
def test_c23_a_zero_router_collapses_onto_the_lowest_ids(num_experts, top_k):
    router = TopKRouter(16, num_experts, top_k)
    torch.nn.init.zeros_(router.weight)
    routing = router(torch.randn(1000, 16))
    assert routing.expert_ids_TK.eq(torch.arange(top_k)).all()
    assert routing.load().tolist() == [1000] * top_k + [0] * (num_experts - top_k)


def test_c28_ids_of_minus_one_are_not_counted():
    assert count_load(torch.tensor([0, 1, -1, 3, 3, -1]), 4).tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize("appended", [False, True], ids=["C15-T4", "C15-T6"])
def test_c15_a_mask_is_over_tokens(appended):
    chosen = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]]
    mask = [True, True, False, False]
    if appended:
        chosen, mask = [*chosen, [1, 1, 0, 0], [1, 0, 0, 1]], [*mask, False, False]
    routing = route([[float(v) for v in row] for row in chosen], 2, mask=mask)
    assert routing.load().tolist() == [2, 1, 1, 0]
    assert routing.expert_ids_TK[2:].eq(-1).all()
    assert routing.weights_TK[2:].eq(0).all()


def test_noise_is_seen_by_the_choice_and_not_by_logits_or_scores():
    torch.manual_seed(0)
    router = TopKRouter(8, 16, 2, noise_std=5.0)
    x = torch.randn(64, 8)
    noisy, clean = router(x), router.eval()(x)
    assert torch.equal(noisy.logits_TE, clean.logits_TE)
    assert torch.equal(noisy.scores_TE, clean.scores_TE)
    assert not torch.equal(noisy.expert_ids_TK, clean.expert_ids_TK)
    assert clean.selection_TE is None or torch.equal(clean.unbiased_selection_TE, clean.scores_TE)


def test_logits_stay_float32_under_autocast():
    router = TopKRouter(32, 8, 2)
    x = torch.randn(10, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x.bfloat16())
    exact = x.bfloat16().float() @ router.weight.T
    assert routing.logits_TE.dtype == torch.float32
    torch.testing.assert_close(routing.logits_TE, exact, rtol=1e-6, atol=1e-6)


def test_a_bias_in_the_weights_only_on_request():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 2.0])
    options = {"softmax_after_top_k": True}
    default = TopKRouter(4, 3, 2, **options).route_logits(logits, bias)
    teaching = TopKRouter(4, 3, 2, **options, bias_in_weights=True).route_logits(logits, bias)
    assert default.expert_ids_TK.tolist() == teaching.expert_ids_TK.tolist() == [[0, 2]]  # corrected 2, 1, 2
    assert default.weights_TK[0].tolist() == pytest.approx([0.8808, 0.1192], abs=1e-4)
    assert teaching.weights_TK[0].tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(ValueError, match="bias_in_weights=True needs softmax_after_top_k"):
        TopKRouter(4, 3, 2, bias_in_weights=True)


def test_a_learned_router_bias_is_part_of_the_logits():
    router = TopKRouter(4, 3, 1, bias=True)
    with torch.no_grad():
        router.weight.zero_()
        router.bias.copy_(torch.tensor([0.0, 2.0, 1.0]))
    routing = router(torch.randn(5, 4))
    assert routing.logits_TE.tolist() == [[0.0, 2.0, 1.0]] * 5
    assert routing.expert_ids_TK.flatten().tolist() == [1] * 5
    routing.weights_TK.sum().backward()
    assert router.bias.grad.abs().sum() > 0
    assert "bias" not in TopKRouter(4, 3, 1).state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_rows_that_are_not_finite_are_invalid_wherever_the_value_stands(dtype, width):
    x = torch.randn(4 * width, width).to(dtype)
    for place in range(width):
        for row, value in enumerate((nan, inf, -inf)):
            x[4 * place + row, place] = value
    expected = [row % 4 != 3 for row in range(4 * width)]
    assert TopKRouter(width, 4, 2)(x).invalid_T.tolist() == expected


def test_nan_activations_leave_the_router_gradient_finite():
    router = TopKRouter(4, 8, 2)
    x = torch.randn(5, 4)
    x[2] = nan
    routing = router(x)
    routing.weights_TK.square().sum().backward()
    assert routing.invalid_T.tolist() == [False, False, True, False, False]
    assert router.weight.grad.isfinite().all()
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_router_gets_a_gradient_by_default(top_k):
    router = TopKRouter(4, 8, top_k)
    router(torch.randn(5, 4)).weights_TK.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 9}, "top_k=9.*num_experts=8"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"score_function": "relu"}, "'relu'.*'softmax', 'sigmoid'"),
        ({"top_k": 1, "renormalize": True}, "top_k=1"),
        ({"noise_std": nan}, "noise_std=nan"),
        ({"routed_scaling_factor": inf}, "routed_scaling_factor=inf"),
        ({"score_function": "sigmoid", "softmax_after_top_k": True}, "softmax_after_top_k"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        TopKRouter(**{"d_model": 4, "num_experts": 8, "top_k": 2, **arguments})


def test_bad_shapes_are_named():
    router = TopKRouter(4, 8, 2)
    with pytest.raises(ValueError, match=r"\(3, 5\).*d_model=4"):
        router(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"token_mask.*\(3, 8\).*3 tokens"):
        router(torch.zeros(3, 4), token_mask=torch.ones(3, 8))
    with pytest.raises(ValueError, match=r"expert_bias.*\(7,\).*8 experts"):
        router(torch.zeros(3, 4), expert_bias=torch.zeros(7))


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 12),
    st.integers(1, 9),
    st.data(),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
)
def test_choices_equal_a_plain_sort(T, E, data, score_function, with_bias):
    top_k = data.draw(st.integers(1, E))
    # few distinct values, so that ties are common
    flat = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=T * E, max_size=T * E))
    logits = torch.tensor(flat).view(T, E)
    bias = torch.linspace(-1, 1, E).round(decimals=1) if with_bias else None
    router = TopKRouter(4, E, top_k, score_function=score_function)
    routing = router.route_logits(logits, bias)
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    corrected = scores if bias is None else scores + bias
    for t in range(T):
        best = sorted(range(E), key=lambda e: (-corrected[t, e].item(), e))[:top_k]
        assert routing.expert_ids_TK[t].tolist() == best
        raw = [scores[t, e].item() for e in best]
        total = sum(raw) if router.renormalize else 1.0
        assert routing.weights_TK[t].tolist() == pytest.approx([w / total for w in raw], rel=1e-5)
