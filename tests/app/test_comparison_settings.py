"""What runs were made of: where their manifests differ, and groups of runs that agree in a setting."""

from pathlib import Path
from typing import Any

import pytest
from compared_runs import write

from app import comparison_settings as cs
from app.comparison import Compared
from recorder.reader import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    """Two balancers by two seeds, and one of other sizes."""
    folder = tmp_path_factory.mktemp("runs")
    made: list[tuple[str, dict[str, Any]]] = [
        ("a", {"balancer": "aux", "config": {"seed": 0}}),
        ("b", {"balancer": "aux", "config": {"seed": 1}}),
        ("c", {"balancer": "none", "config": {"seed": 0, "capacity_factor": 1.25}}),
        ("d", {"balancer": "none", "config": {"seed": 1}, "top_k": 2}),
    ]
    paths: list[Path] = [write(folder, name, range(1), [4, 4], **settings) for name, settings in made]
    return [
        Compared(label=path.name, reference=path.name, colour=place, run=Run(path)) for place, path in enumerate(paths)
    ]


def test_only_what_differs_stands_in_the_table(runs: list[Compared]) -> None:
    table = cs.table(runs).set_index("setting")
    assert set(table.index) == {"balancer", "seed", "top_k", "capacity_factor"}
    assert list(table.index)[:2] == ["balancer", "seed"], "what one asks for first"
    assert table.loc["balancer"].tolist() == ["aux", "aux", "none", "none"]
    assert table.loc["top_k"].tolist() == ["1", "1", "1", "2"], "from the layers where the configuration lacks it"
    assert table.loc["capacity_factor"].tolist() == ["not recorded", "not recorded", "1.25", "not recorded"]


def test_the_sentence_says_when_more_than_one_thing_differs(runs: list[Compared]) -> None:
    assert cs.sentence(runs[:2]) == "They differ in seed (0 and 1)."
    assert cs.sentence([runs[0], runs[3]]) == (
        "They differ in balancer (aux and none), seed (0 and 1) and top_k (1 and 2). More than one setting differs: "
        "what each of them did cannot be told from these two runs."
    )
    assert cs.sentence([runs[0], runs[0]]) == "No recorded setting tells these runs apart."
    assert cs.sentence(runs).endswith("and 1 more setting.")


def test_groups_by_a_setting(runs: list[Compared]) -> None:
    fields = cs.group_fields(runs)
    assert fields[:3] == ["balancer", "num_experts", "seed"]
    assert "capacity_factor" in fields
    assert "task" not in fields, "all agree"
    found = cs.groups(runs, "seed")
    assert {name: [one.label for one in group] for name, group in found.items()} == {"0": ["a", "c"], "1": ["b", "d"]}
    assert set(cs.within_groups(cs.groups(runs, "balancer"))) == {"seed", "capacity_factor", "top_k"}
    assert list(cs.groups(runs, "capacity_factor")) == ["1.25", "not recorded"]


def test_numbers_are_grouped_in_their_order_and_a_field_that_tells_all_apart_is_none() -> None:
    manifests = [{"config": {"num_experts": number}} for number in (16, 2, 128, 2)]

    class Bare:
        def __init__(self, manifest: dict[str, Any]) -> None:
            self.manifest = manifest

    runs = [
        Compared(label=str(place), reference=str(place), colour=0, run=Bare(manifest))  # type: ignore[arg-type]
        for place, manifest in enumerate(manifests)
    ]
    assert list(cs.groups(runs, "num_experts")) == ["2", "16", "128"]
    words = [
        Compared(label=text, reference=text, colour=0, run=Bare({"config": {"recipe": text}}))
        for text in ("b", "", "a")
    ]  # type: ignore[arg-type]
    assert list(cs.groups([*words, *runs[:1]], "recipe")) == ["not recorded", "none", "a", "b"]
    assert "recipe" not in cs.differing([words[1], runs[0]]), "to lack a setting is not to differ from none"
    assert cs.differing([words[0], runs[0]])["recipe"] == ["b", "not recorded"]
    assert cs.group_fields(runs[:3]) == []
    assert cs.group_fields([runs[1], runs[3]]) == ["num_experts"], "all in one group, for their mean and spread"
