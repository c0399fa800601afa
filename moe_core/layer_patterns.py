"""Where the dense and the MoE layers stand in a model. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from .whole import whole


def moe_layer_indices(
    num_layers: int,
    *,
    moe_frequency: int = 1,
    moe_offset: int | None = None,
    first_k_dense: int = 0,
    explicit: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Indices of the MoE layers; all others are dense.

    Layer i is MoE where i >= first_k_dense and (i - moe_offset) is a multiple of moe_frequency. The forms found in
    code: `i % 2 != 0` is moe_frequency 2; `i % n == n - 1` is moe_frequency n; `i % n == 0` has moe_offset 0 as well.

    Args:
        num_layers: layers in the model, dense ones counted, at least 1.
        moe_frequency: every so many layers one is MoE, at least 1 (1: all of them).
        moe_offset: the first MoE layer of the pattern, 0 to moe_frequency - 1. By default the last of each
            group, moe_frequency - 1, so that 2 gives dense, MoE, dense, MoE.
        first_k_dense: this many layers at the start stay dense whatever the pattern says.
        explicit: the MoE layers by index, in any order, instead of a pattern.

    Returns:
        Ascending indices, 0 to num_layers - 1; empty where the pattern leaves none.

    Raises:
        ValueError: a value is out of range, an explicit index comes twice, or explicit comes with a pattern.

    >>> moe_layer_indices(6, moe_frequency=2)
    (1, 3, 5)
    >>> moe_layer_indices(6, first_k_dense=3)
    (3, 4, 5)
    """
    num_layers = whole("num_layers", num_layers, 1)
    moe_frequency = whole("moe_frequency", moe_frequency, 1)
    first_k_dense = whole("first_k_dense", first_k_dense, 0, num_layers)
    if explicit is not None:
        if moe_frequency != 1 or moe_offset is not None or first_k_dense != 0:
            raise ValueError(
                f"explicit={list(explicit)} names the MoE layers itself: leave out "
                f"moe_frequency={moe_frequency}, moe_offset={moe_offset} and first_k_dense={first_k_dense}"
            )
        indices = sorted(whole("explicit layer", i, 0, num_layers - 1) for i in explicit)
        if len(set(indices)) < len(indices):
            raise ValueError(f"explicit={list(explicit)} names a layer twice")
        return tuple(indices)
    if moe_offset is None:
        moe_offset = moe_frequency - 1
    moe_offset = whole("moe_offset", moe_offset, 0, moe_frequency - 1)
    return tuple(i for i in range(first_k_dense, num_layers) if (i - moe_offset) % moe_frequency == 0)
