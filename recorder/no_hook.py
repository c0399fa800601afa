"""What a recorder's hook becomes in a copy of the model."""

from typing import Any


def no_hook(*_: Any) -> None:
    """Does nothing: the copy is not recorded."""
