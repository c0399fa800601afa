"""What tells runs of one name apart."""

from datetime import datetime

from app.run_labels import labels


def at(text: str) -> str:
    return datetime.fromisoformat(text).astimezone().isoformat()


def test_runs_that_share_a_name_are_told_apart_by_when_they_were_recorded() -> None:
    times = [at("2026-12-01T12:30:05"), at("2026-12-01T14:00:00"), at("2026-12-01T12:30:00")]
    assert labels(["Aux", "Aux", "None"], times, ["a", "b", "c"]) == [
        "Aux (01 Dec 12:30)",
        "Aux (01 Dec 14:00)",
        "None",
    ]
    assert labels(["Aux"] * 2, [at("2025-12-01T12:30:00"), times[0]], ["a", "b"]) == [
        "Aux (01 Dec 2025 12:30)",
        "Aux (01 Dec 2026 12:30)",
    ]
    assert labels(["Aux"] * 2, [times[0], times[2]], ["a", "b"]) == ["Aux (01 Dec 12:30:05)", "Aux (01 Dec 12:30:00)"]


def test_without_times_that_differ_the_reference_does() -> None:
    time = at("2026-12-01T12:30:05")
    for times in ([time, time], [time, None], [None, "yesterday"]):
        assert labels(["Aux", "Aux"], times, ["a", "x/a"]) == ["Aux (a)", "Aux (x/a)"]
