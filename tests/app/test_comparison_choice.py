"""Which colour a run has in a comparison: it stays while others come and go."""

from app.comparison_choice import COLOURS, assign

PLACES = {f"run{number}": number for number in range(200)}


def test_a_run_takes_the_hue_of_its_place() -> None:
    assert assign(["run3", "run1"], {}, PLACES) == {"run3": 3, "run1": 1}


def test_two_runs_of_one_hue_get_two_and_keep_them() -> None:
    first = assign(["run1", "run8", "run15"], {}, PLACES)
    assert first == {"run1": 1, "run8": 2, "run15": 3}
    alone = assign(["run8", "run15"], first, PLACES)
    assert alone == {"run8": 2, "run15": 3}, "one that goes changes none of the others"
    more = assign(["run2", "run8", "run15"], first, PLACES)
    assert more["run8"] == 2, "nor does one that comes, whatever its place"
    assert more["run2"] not in (2, 3)
    back = assign(["run8", "run15", "run1"], first, PLACES)
    assert back == first


def test_two_of_few_runs_are_never_much_alike() -> None:
    places = {"aux": 1, "quantile": 3, "mine": 5}
    assert assign(["mine", "aux", "quantile"], {}, places) == {"mine": 5, "aux": 2, "quantile": 3}


def test_twelve_runs_have_twelve_looks_and_hues_first() -> None:
    twelve = [f"run{7 * number}" for number in range(12)]
    found = assign(twelve, {}, PLACES)
    assert sorted(found.values()) == list(range(12))
    assert assign(["run1", "run5"], {"run1": 4, "run5": 4}, PLACES) == {"run1": 4, "run5": 5}, "a link of another's"
    assert len(set(assign(list(PLACES)[:COLOURS], {}, PLACES).values())) == COLOURS
