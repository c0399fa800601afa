"""Every number of the lab, against values computed by hand and against plain numpy.

Shapes: T tokens, E experts, K choices a token.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.lab import frames, run, steps
from app.lab.batch import Batch
from app.lab.lab import Lab
from app.lab.settings import Settings


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def a_lab(T: int = 12, E: int = 8, bias: np.ndarray | None = None, seed: int = 0, **settings: Any) -> Lab:
    """A lab with random logits, by default top-2."""
    logits = np.random.default_rng(seed).standard_normal((T, E)) + np.linspace(0, 1, E)
    lab = Lab.of("random", Settings(**{"top_k": 2, "tokens": T, "experts": E, **settings})).with_batch(Batch.of(logits))
    return lab if bias is None else replace(lab, state=replace(lab.state, bias_E=bias.astype(np.float32)))


# ------------------------------------------------------------------------------------------ worked cases


def test_c2_padding_counts_nowhere() -> None:
    outcome = run.run(Lab.of("padding"))
    assert outcome.load_E.tolist() == [1, 1]
    assert outcome.aux_loss == pytest.approx(1.0, abs=5e-5)
    assert outcome.num_routed == 2
    # both real tokens: ln(e^2 + e^0)^2
    assert outcome.z_loss == pytest.approx(np.log(np.exp(2) + 1) ** 2, rel=1e-6)
    table = frames.shares(outcome, Lab.of("padding").settings)
    assert table["f"].tolist() == [0.5, 0.5]
    assert table["P"].tolist() == pytest.approx([0.5, 0.5])


def test_c4_aux_loss_by_hand() -> None:
    lab = Lab.of("six-of-eight")
    outcome = run.run(lab)
    table = frames.shares(outcome, lab.settings)
    assert table["P"].round(4).tolist() == [0.7153, 0.25, 0.0174, 0.0174]
    assert table["f"].tolist() == [0.75, 0.25, 0, 0]
    assert table["E x f x P"].sum() == pytest.approx(2.3958, abs=5e-5)
    assert outcome.aux_loss == pytest.approx(2.3958, abs=5e-5)
    assert outcome.loss == pytest.approx(0.023958, abs=5e-7)


def test_c17_the_bias_chooses_and_the_score_weighs() -> None:
    lab = Lab.of("bias-chooses")
    outcome = run.run(lab)
    assert outcome.scores_TE[0] == pytest.approx([0.6, 0.5, 0.4])
    assert outcome.expert_ids_TK.tolist() == [[2, 0]]
    assert outcome.raw_TK[0] == pytest.approx([0.4, 0.6])
    assert outcome.weights_TK[0] == pytest.approx([0.4, 0.6])
    assert outcome.threshold_T == pytest.approx([0.5])
    assert outcome.rerouted == 1
    stages = frames.followed(outcome, steps.ranking(outcome, lab.settings), lab.settings, 0).set_index("stage")
    assert stages.loc["corrected"].tolist()[1:] == pytest.approx([0.6, 0.5, 0.7])
    assert stages.loc["place"].tolist()[1:] == [2, 3, 1]
    assert stages.loc["weight"].tolist()[1:] == pytest.approx([0.6, np.nan, 0.4], nan_ok=True)


def test_c19_what_is_over_capacity_is_dropped_and_still_counted() -> None:
    outcome = run.run(Lab.of("full"))
    assert outcome.capacity == 2
    assert outcome.kept_TK is not None
    assert outcome.kept_TK[:, 0].tolist() == [True, True, True, False, False, True]
    table = frames.loads(outcome)
    assert table["load"].tolist() == [4, 1, 1]
    assert table["kept"].tolist() == [2, 1, 1]
    assert table["dropped"].sum() / table["load"].sum() == pytest.approx(1 / 3)


def test_c22_invalid_rows_stand_apart() -> None:
    lab = Lab.of("broken")
    outcome = run.run(lab)
    broken = [1, 3, 5]
    assert np.flatnonzero(outcome.invalid_T).tolist() == broken
    assert (outcome.expert_ids_TK[broken] == -1).all()
    assert (outcome.weights_TK[broken] == 0).all()
    alone = run.run(lab.with_batch(Batch.of(np.delete(lab.batch.logits_TE, broken, axis=0))))
    np.testing.assert_array_equal(np.delete(outcome.expert_ids_TK, broken, axis=0), alone.expert_ids_TK)
    np.testing.assert_array_equal(np.delete(outcome.weights_TK, broken, axis=0), alone.weights_TK)
    assert outcome.z_loss == pytest.approx(alone.z_loss)
    assert outcome.gradient_TE is not None
    assert (outcome.gradient_TE[broken] == 0).all()
    moved = run.advance(lab)
    np.testing.assert_array_equal(moved.batch.logits_TE[broken], lab.batch.logits_TE[broken])


@pytest.mark.parametrize(("preset", "k"), [("zero-router", 2), ("zero-router-64", 8)])
def test_c23_a_router_of_zeros_collapses_onto_the_lowest_ids(preset: str, k: int) -> None:
    outcome = run.run(Lab.of(preset))
    E = outcome.logits_TE.shape[1]
    assert outcome.load_E.tolist() == [1000] * k + [0] * (E - k)
    assert outcome.expert_ids_TK[0].tolist() == list(range(k))
    assert outcome.z_loss == pytest.approx(np.log(E) ** 2, rel=1e-5)
    # the sign rule: what is below the mean count rises by 0.001, the rest falls, and the mean is taken off
    expected = 0.001 * np.where(np.arange(E) < k, -1, 1)
    np.testing.assert_allclose(outcome.updated.bias_E, expected - expected.mean(), atol=1e-9)


def test_the_z_loss_of_zeros_over_four_experts() -> None:
    assert run.run(a_lab().with_batch(Batch.of(np.zeros((3, 4))))).z_loss == pytest.approx(1.9218, abs=5e-5)


def test_orders_of_softmax_and_top_k() -> None:
    lab = a_lab(top_k=2).with_batch(Batch.of([[1.0, 0.0, -1.0]]))
    before = run.run(lab.with_settings(router="softmax", renormalize="no"))
    assert before.weights_TK[0] == pytest.approx([0.6652, 0.2447], abs=5e-5)
    for settings in ({"router": "softmax"}, {"router": "softmax-after"}):
        after = run.run(lab.with_settings(**settings))
        assert after.weights_TK[0] == pytest.approx([0.7311, 0.2689], abs=5e-5)
    assert run.run(lab.with_settings(scaling=2.5)).weights_TK[0] == pytest.approx([1.8276, 0.6724], abs=5e-5)


# ------------------------------------------------------------------------------------------ plain numpy


@pytest.mark.parametrize("router", ["softmax", "softmax-after", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("biased", [False, True])
def test_a_token_step_by_step(router: str, groups: tuple[int, int], noise: float, biased: bool) -> None:
    bias = np.random.default_rng(1).normal(0, 0.2, 8) if biased else None
    lab = a_lab(bias=bias, router=router, num_groups=groups[0], top_groups=groups[1], noise_std=noise, scaling=2.0)
    outcome = run.run(lab)
    ranking = steps.ranking(outcome, lab.settings)
    assert (outcome.noisy_TE is None) == (noise == 0)
    for t in range(12):
        z = lab.batch.logits_TE[t].astype(np.float64) if outcome.noisy_TE is None else outcome.noisy_TE[t]
        scores = 1 / (1 + np.exp(-z)) if router == "sigmoid" else softmax(z)
        ranked = (z if router == "softmax-after" else scores) + (0 if bias is None else bias)
        if groups != (1, 1):
            totals = [sum(sorted(ranked[2 * g : 2 * g + 2])[-(2 if biased else 1) :]) for g in range(4)]
            best = sorted(range(4), key=lambda g: -totals[g])[:2]
            ranked = np.array([ranked[e] if e // 2 in best else -np.inf for e in range(8)])
            assert ranking.group_scores_TG is not None
            np.testing.assert_allclose(ranking.group_scores_TG[t], totals, rtol=1e-5)
        order = sorted(range(8), key=lambda e: -ranked[e])
        np.testing.assert_allclose(ranking.corrected_TE[t], ranked, rtol=2e-5, atol=1e-6)
        assert ranking.order_TR[t].tolist() == order[:3]
        assert outcome.expert_ids_TK[t].tolist() == order[:2]
        if groups == (1, 1):
            assert outcome.threshold_T is not None
            assert outcome.threshold_T[t] == pytest.approx(ranked[order[2]], rel=1e-5)
        raw = np.exp(z[order[:2]]) if router == "softmax-after" else scores[order[:2]]
        np.testing.assert_allclose(outcome.unscaled_TK[t], raw / raw.sum(), rtol=1e-5)
        np.testing.assert_allclose(outcome.weights_TK[t], 2 * raw / raw.sum(), rtol=1e-5)
        if router != "softmax-after":
            np.testing.assert_allclose(outcome.raw_TK[t], raw, rtol=1e-5)


def test_noise_is_seen_by_the_choice_and_not_by_the_losses() -> None:
    quiet, loud = run.run(a_lab()), run.run(a_lab(noise_std=1.0))
    again, other = run.run(a_lab(noise_std=1.0)), run.run(a_lab(noise_std=1.0, noise_seed=1))
    assert loud.noisy_TE is not None
    assert again.noisy_TE is not None
    assert other.noisy_TE is not None
    np.testing.assert_array_equal(loud.noisy_TE, again.noisy_TE)
    assert not np.array_equal(loud.noisy_TE, other.noisy_TE)
    assert not np.array_equal(loud.expert_ids_TK, quiet.expert_ids_TK)
    assert loud.z_loss == quiet.z_loss
    np.testing.assert_array_equal(loud.scores_TE, quiet.scores_TE)


def test_expert_choice_takes_each_experts_best_tokens() -> None:
    lab = a_lab(router="expert-choice")
    outcome = run.run(lab)
    scores = softmax(lab.batch.logits_TE.astype(np.float64))
    places = steps.rank_in_column(outcome.selection_TE)
    assert steps.taken_by_each(12, lab.settings, 8) == 3
    for e in range(8):
        best = np.argsort(-scores[:, e], kind="stable")[:3]
        assert sorted(np.flatnonzero((outcome.expert_ids_TK == e).any(1))) == sorted(best)
        assert sorted(np.flatnonzero(places[:, e] <= 3)) == sorted(best)
    assert outcome.load_E.tolist() == [3] * 8
    table = frames.assignments(outcome)
    np.testing.assert_allclose(table["weight"], scores[table["token"], table["expert"]], rtol=1e-5)


@pytest.mark.parametrize(("router", "k"), [("softmax", 1), ("softmax", 2), ("sigmoid", 3), ("softmax-after", 2)])
def test_the_quantile_rule(router: str, k: int) -> None:
    bias = np.random.default_rng(2).normal(0, 0.1, 8)
    lab = a_lab(T=30, router=router, top_k=k, balancer="quantile", bias=bias)
    outcome = run.run(lab)
    z = lab.batch.logits_TE.astype(np.float64)
    scores = {"softmax": softmax(z), "sigmoid": 1 / (1 + np.exp(-z)), "softmax-after": z}[router]
    threshold = np.sort(scores + bias, axis=1)[:, -k - 1]
    gaps = threshold[:, None] - scores
    quantile = np.quantile(gaps, k / 8, axis=0, method="higher")
    update = steps.quantile_update(outcome, lab.settings)
    assert update is not None
    np.testing.assert_allclose(update.gap_TE, gaps, atol=2e-6)
    np.testing.assert_allclose(update.quantile_E, quantile, atol=2e-6)
    np.testing.assert_allclose(update.bias_E, quantile - quantile.mean(), atol=2e-6)
    np.testing.assert_allclose(outcome.updated.bias_E, quantile - quantile.mean(), atol=2e-6)
    table = frames.gaps_in_order(update)
    chosen = table[table["which"] == "quantile"].iloc[0, 2:].astype(float)
    np.testing.assert_allclose(chosen, quantile, atol=2e-6)


@pytest.mark.parametrize("bins", [1, 4, 1024])
def test_the_histograms_quantile_is_within_one_bin(bins: int) -> None:
    lab = a_lab(T=30, balancer="quantile", method="histogram", num_bins=bins)
    outcome = run.run(lab)
    update, exact = (steps.quantile_update(outcome, replace(lab.settings, method=m)) for m in ("histogram", "exact"))
    assert update is not None
    assert exact is not None
    assert update.width_E is not None
    assert (np.abs(update.quantile_E - exact.quantile_E) <= update.width_E / 2 + 1e-9).all()
    np.testing.assert_allclose(outcome.updated.bias_E, update.bias_E, atol=1e-6)


def test_a_quantile_each_step_is_the_mean_of_its_micro_batches() -> None:
    lab = a_lab(balancer="quantile", update="step")
    first = steps.quantile_update(run.run(lab), lab.settings)
    taken = run.take_in(lab)
    np.testing.assert_array_equal(taken.state.bias_E, np.zeros(8))
    assert taken.state.num_updates == 1
    assert taken.state.is_between_steps
    taken = Lab.from_entries(taken.entries()).with_batch(a_lab(seed=7).batch)
    outcome = run.run(taken)
    second = steps.quantile_update(outcome, lab.settings)
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(outcome.updated.bias_E, (first.bias_E + second.bias_E) / 2, atol=1e-6)
    assert outcome.updated.num_updates == 0
    assert not run.advance(taken).state.is_between_steps


def test_the_sign_rule_counts_micro_batches() -> None:
    lab = a_lab(balancer="sign-bias", bias_rate=0.01, bias=np.full(8, 0.5))
    load = run.run(lab).load_E
    assert load.sum() == 24
    taken = run.take_in(lab)
    outcome = run.run(taken)
    np.testing.assert_array_equal(outcome.observed.count_E, 2 * load)
    delta = 0.01 * np.sign(load.mean() - load)
    table = frames.sign_steps(outcome, lab.settings)
    np.testing.assert_allclose(table["delta"], delta)
    np.testing.assert_allclose(table["delta - mean"], delta - delta.mean())
    np.testing.assert_allclose(outcome.updated.bias_E, 0.5 + delta - delta.mean(), atol=1e-6)
    ten = run.advance(lab, 10)
    assert ten.applied == 10
    assert np.abs(ten.state.bias_E - 0.5).max() > 0.05


@pytest.mark.parametrize("balancer", ["aux", "sequence-aux", "global-aux", "soft-aux", "soft-sequence-aux"])
def test_aux_losses_and_their_gradients(balancer: str) -> None:
    mask = np.arange(12) != 4
    lab = a_lab(balancer=balancer, sequences=3 if "sequence" in balancer else 1, aux_coef=0.1)
    lab = lab.with_batch(replace(lab.batch, mask_T=mask))
    outcome = run.run(lab)
    groups = np.array_split(np.arange(12), lab.settings.sequences)
    assert len(groups) == (3 if "sequence" in balancer else 1)

    def loss(z: np.ndarray) -> float:
        found = []
        for tokens in groups:
            tokens = tokens[mask[tokens]]
            mean = softmax(z[tokens]).mean(0)
            ids = outcome.expert_ids_TK[tokens]
            share = mean if balancer.startswith("soft") else np.bincount(ids.ravel(), minlength=8) / ids.size
            found.append(8 * (share * mean).sum())
        return float(np.mean(found))

    z = lab.batch.logits_TE.astype(np.float64)
    assert outcome.aux_loss == pytest.approx(loss(z), rel=1e-5)
    assert outcome.loss == pytest.approx(0.1 * loss(z), rel=1e-5)
    table = frames.shares(outcome, lab.settings)
    sums = table.groupby("sequence")["E x f x P"].sum() if "sequence" in table else table["E x f x P"].sum()
    assert np.mean(sums) == pytest.approx(loss(z), rel=1e-5)
    assert outcome.gradient_TE is not None
    for t, e in ((0, 0), (3, 7), (4, 2), (11, 5)):
        near = np.zeros_like(z)
        near[t, e] = 1e-5
        slope = 0.1 * (loss(z + near) - loss(z - near)) / 2e-5
        assert outcome.gradient_TE[t, e] == pytest.approx(slope, abs=1e-6)
    moved = run.advance(lab.with_settings(push=10))
    np.testing.assert_allclose(moved.batch.logits_TE, z - 10 * outcome.gradient_TE, atol=1e-5)


def test_the_global_aux_loss_remembers_the_steps_micro_batches() -> None:
    lab = a_lab(balancer="global-aux")
    first = run.run(lab)
    taken = run.take_in(lab).with_batch(a_lab(seed=9).batch)
    outcome = run.run(taken)
    count = first.load_E + outcome.load_E
    P = softmax(taken.batch.logits_TE.astype(np.float64)).mean(0)
    assert outcome.aux_loss == pytest.approx(8 * (count / count.sum() * P).sum(), rel=1e-5)
    assert frames.shares(outcome, lab.settings)["f"].tolist() == pytest.approx((count / count.sum()).tolist())


def test_the_z_loss_and_its_terms() -> None:
    lab = a_lab(balancer="z", z_coef=0.01)
    outcome = run.run(lab)
    z = lab.batch.logits_TE.astype(np.float64)
    terms = np.log(np.exp(z).sum(1))
    table = frames.z_terms(outcome)
    np.testing.assert_allclose(table["logsumexp"], terms, rtol=1e-6)
    assert table["squared"].mean() == pytest.approx(outcome.z_loss, rel=1e-5)
    assert outcome.loss == pytest.approx(0.01 * (terms**2).mean(), rel=1e-5)
    assert outcome.gradient_TE is not None
    np.testing.assert_allclose(outcome.gradient_TE, 0.01 * 2 * terms[:, None] * softmax(z) / 12, rtol=1e-4)


@pytest.mark.parametrize("policy", ["position", "probs"])
def test_capacity_keeps_the_first_or_the_heaviest(policy: str) -> None:
    lab = a_lab(capacity_factor=0.5, min_capacity=2, drop_policy=policy)
    outcome = run.run(lab)
    assert outcome.capacity == max(int(np.ceil(12 * 2 / 8 * 0.5)), 2)
    table = frames.assignments(outcome)
    for _, group in table.groupby("expert"):
        order = ["choice", "token"] if policy == "position" else ["weight", "choice", "token"]
        up = [True, True] if policy == "position" else [False, True, True]
        wanted = group.sort_values(order, ascending=up).head(outcome.capacity).index
        assert sorted(group.index[group["kept"]]) == sorted(wanted)


def test_the_load_after_the_update_is_that_of_the_next_run() -> None:
    for balancer in ("quantile", "sign-bias", "aux", "z"):
        lab = a_lab(balancer=balancer, push=500)
        np.testing.assert_array_equal(run.run(lab).next_load_E, run.run(run.advance(lab)).load_E)


def test_one_quantile_update_evens_the_collapse_out() -> None:
    outcome = run.run(Lab.of("collapse"))
    assert outcome.load_E.tolist() == [1, 1, 6, 0]
    assert outcome.next_load_E.tolist() == [2, 2, 2, 2]


def test_what_does_not_go_together_is_refused_in_words() -> None:
    for changes, said in (
        ({"router": "softmax-after", "top_k": 1}, "top_k=1"),
        ({"balancer": "quantile", "top_k": 8}, "needs num_experts > top_k"),
        ({"balancer": "quantile", "num_groups": 4, "top_groups": 2}, "group-limited"),
        ({"balancer": "sign-bias", "router": "expert-choice"}, "no effect on a ExpertChoiceRouter"),
    ):
        with pytest.raises(ValueError, match=said):
            run.run(a_lab(**changes))
