"""The lab's state: presets, the URL there and back, and edits of the table."""

import numpy as np
import pytest

from app.lab.batch import Batch, random_batch
from app.lab.lab import MOST_CELLS, Lab, number, same, written
from app.lab.logit_table import apply_edits
from app.lab.presets import PRESETS
from app.lab.settings import CHOICES, LIMITS, Settings


def assert_alike(one: Lab, other: Lab) -> None:
    assert one.preset == other.preset
    assert one.settings == other.settings
    assert one.applied == other.applied
    assert same(one.batch.logits_TE, other.batch.logits_TE)
    assert same(one.batch.mask_T, other.batch.mask_T)
    for name in ("bias_E", "count_E", "bias_sum_E"):
        assert same(getattr(one.state, name), getattr(other.state, name)), name
    assert one.state.num_updates == other.state.num_updates


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_name_alone_in_the_url(preset: str) -> None:
    lab = Lab.of(preset)
    assert lab.entries() == [preset]
    assert_alike(Lab.from_entries([preset]), lab)


def test_every_number_is_a_setting_with_limits_and_every_word_with_choices() -> None:
    fields = Settings.__dataclass_fields__
    assert set(CHOICES) | set(LIMITS) == set(fields)
    for name, (low, high) in LIMITS.items():
        assert low <= getattr(Settings(), name) <= high


def test_everything_that_was_changed_comes_back_from_the_url() -> None:
    lab = Lab.of("collapse").with_settings(top_k=2, router="sigmoid", noise_std=0.25, capacity_factor=1.25)
    rows = lab.batch.logits_TE.copy()
    rows[0, 1], rows[1, 0], rows[2, 3], rows[3, 3] = np.nan, -np.inf, 1 / 3, -1e-7
    lab = lab.with_batch(Batch(logits_TE=rows, mask_T=np.arange(8) != 5)).with_bias(2, -0.1234567)
    told = lab.entries()
    assert told[:2] == ["collapse", "router:sigmoid"]
    assert "mask:1_1_1_1_1_0_1_1" in told
    assert all("&" not in entry and "#" not in entry for entry in told)
    assert_alike(Lab.from_entries(told), lab)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        ["<script>"],
        ["collapse", "top_k:many", "router:best", "bias:1_2", "logits:1_2~3", "mask:1", "applied:-3", "count:x", ":"],
        ["collapse", "logits:" + "~".join(["_".join(["0"] * 64)] * 64)],
        ["collapse", "bias:nan_0_0_0", "num_updates:99999999999", "scaling:nan", "top_k:1e3"],
    ],
)
def test_nonsense_in_the_url_is_the_preset(entries: list[str]) -> None:
    assert Lab.from_entries(entries).entries() == ["collapse"]


def test_numbers_beyond_their_limits_are_fitted() -> None:
    lab = Lab.from_entries(["collapse", "top_k:99", "num_groups:3", "sequences:5", "spot_token:77", "noise_std:-1"])
    fitted = (lab.settings.top_k, lab.settings.num_groups, lab.settings.sequences, lab.settings.spot_token)
    assert fitted == (4, 1, 1, 7)
    assert lab.settings.noise_std == 0
    # 4 groups of 2 experts: 3 experts a token need 2 groups at least
    assert Lab.from_entries(["groups", "top_k:3", "top_groups:1"]).settings.top_groups == 2


def test_the_random_batch_is_normal_with_popular_experts() -> None:
    batch = random_batch(3, 1000, 8, skew=2.0)
    generator = np.random.default_rng(3)
    offsets = generator.standard_normal(8)
    expected = generator.standard_normal((1000, 8)) + 2 * offsets
    np.testing.assert_allclose(batch.logits_TE, expected, atol=0.0051)
    assert not np.array_equal(random_batch(4, 8, 4, 1).logits_TE, random_batch(5, 8, 4, 1).logits_TE)


def test_a_random_batch_is_drawn_anew_until_it_is_changed_by_hand() -> None:
    lab = Lab.of("random")
    other = lab.with_settings(seed=5)
    assert not same(lab.batch.logits_TE, other.batch.logits_TE)
    assert lab.with_settings(tokens=100, experts=16).batch.logits_TE.shape == (100, 16)
    assert not lab.with_settings(tokens=100, experts=16).is_editable
    by_hand = lab.with_batch(lab.batch.resized(8, 5))
    assert same(by_hand.with_settings(seed=5).batch.logits_TE, by_hand.batch.logits_TE)
    assert by_hand.batch.logits_TE.size <= MOST_CELLS


def test_another_number_of_experts_starts_the_balancer_afresh() -> None:
    lab = Lab.of("bias-chooses").with_bias(1, 0.5)
    grown = lab.with_batch(lab.batch.resized(2, 4))
    np.testing.assert_array_equal(grown.state.bias_E, np.zeros(4))
    np.testing.assert_array_equal(grown.batch.logits_TE[1], np.zeros(4))
    np.testing.assert_array_equal(grown.batch.logits_TE[0, :3], lab.batch.logits_TE[0])
    assert lab.with_batch(lab.batch.resized(2, 3)).state.bias_E[1] == 0.5
    assert_alike(Lab.from_entries(grown.entries()), grown)


def test_edits_as_the_table_reports_them() -> None:
    base = Lab.of("collapse").batch
    edits = {0: {"expert 1": "-2.5", "expert 3": "nan"}, 7: {"real": False, "expert 0": "-inf"}, 2: {"expert 2": None}}
    edited, all_read = apply_edits(base, edits)
    assert all_read
    assert edited.logits_TE[0].tolist()[:3] == pytest.approx([0.4, -2.5, 2.0])
    assert np.isnan(edited.logits_TE[0, 3])
    assert np.isnan(edited.logits_TE[2, 2])
    assert np.isneginf(edited.logits_TE[7, 0])
    assert edited.mask_T.tolist() == [True] * 7 + [False]
    untouched = [1, 3, 4, 5, 6]
    np.testing.assert_array_equal(edited.logits_TE[untouched], base.logits_TE[untouched])

    kept, all_read = apply_edits(base, {0: {"expert 0": "much"}, 1: {"expert 0": "7"}})
    assert not all_read
    assert kept.logits_TE[0, 0] == base.logits_TE[0, 0]
    assert kept.logits_TE[1, 0] == 7


def test_numbers_as_they_are_typed_and_written() -> None:
    assert [number(text) for text in ("1", " -2.5 ", "1e3", ".5", "-INF")] == [1, -2.5, 1000, 0.5, -np.inf]
    assert [number(text) for text in ("one", "1,5", "1e30", "--1")] == [None] * 4
    assert np.isnan([number("nan"), number("")]).all()  # type: ignore[list-item]
    assert [written(value) for value in (0.1, -0.0, 2.0, 1 / 3, -np.inf, np.nan)] == [
        "0.1",
        "0",
        "2",
        "0.33333334",
        "-inf",
        "nan",
    ]
