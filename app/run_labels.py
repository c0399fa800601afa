"""What lists of runs call each: its name and, where several share that, when it was recorded."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

_WHEN = ("%d %b %H:%M", "%d %b %Y %H:%M", "%d %b %H:%M:%S")  # the first that tells those of one name apart


def labels(names: Sequence[str], created: Sequence[Any], references: Sequence[str]) -> list[str]:
    """A label for each run, in order: "Aux loss", or "Aux loss (01 Dec 12:30)" where others have that name too.

    created     when each was created, as manifests write it; told in this machine's time, as run ids do
    references  what follows the name instead where times do not tell runs apart or are not known
    """
    shared = {name for name, number in Counter(names).items() if number > 1}
    told = {name: _told_apart([index for index, own in enumerate(names) if own == name], created) for name in shared}
    return [
        f"{name} ({told[name].get(index, reference)})" if name in shared else name
        for index, (name, reference) in enumerate(zip(names, references, strict=True))
    ]


def _told_apart(indices: Sequence[int], created: Sequence[Any]) -> dict[int, str]:
    try:
        moments = [datetime.fromisoformat(created[index]).astimezone() for index in indices]
    except (TypeError, ValueError, OverflowError):
        return {}
    for form in _WHEN:
        words = [f"{moment:{form}}" for moment in moments]
        if len(set(words)) == len(words):
            return dict(zip(indices, words, strict=True))
    return {}
