"""When routing settles, as numbers and in words: saturation and churn over probes, and the tokens that moved last.

Shapes: P probes, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from app.words import count, listed, percent

SETTLED = 0.8  # share of the final choices from which on a layer counts as settled
_EXPERTS = {"expert_there": "expert there", "final_expert": "final expert"}  # a column, and what a table calls it
_NAMED = 3  # layers named one by one in a title


def settled_at(saturation: pd.Series) -> int | None:
    """The first probe from which on at least SETTLED of the choices are the final ones; None where only the last has.

    saturation  by probe step, ascending, undefined = NaN
    """
    behind = np.flatnonzero(~(saturation.to_numpy(np.float64) >= SETTLED))
    first = int(behind[-1]) + 1 if behind.size else 0
    return int(saturation.index[first]) if first < len(saturation) - 1 else None


def headline(saturation: Mapping[int | str, pd.Series]) -> str:
    """The answer in words. saturation: by layer."""
    settled = {layer: settled_at(one) for layer, one in saturation.items()}
    never = [layer for layer, step in settled.items() if step is None]
    share = percent(SETTLED)
    if not never and len(settled) <= _NAMED:
        parts = [f"from step {step:,} on in layer {layer}" for layer, step in settled.items()]
        return f"{share} of the final choices are in place {listed(parts)}"
    if not never:
        last = max(settled, key=lambda layer: settled[layer] or 0)
        return (
            f"All {len(settled)} layers have {share} of their final choices in place from step {settled[last]:,} on, "
            f"layer {last} last"
        )
    which = f"layer {never[0]}" if len(never) == 1 else f"{len(never)} of {count(len(settled), 'layer')}"
    if len(never) == len(settled):
        which = "no layer" if len(settled) > 1 else which
        verb = "has" if len(settled) > 1 else "has not"
        return f"Routing has not settled: {which} {verb} {share} of its final choices in place before the last probe"
    return f"Routing has not settled everywhere: {which} reached {share} of the final choices only at the last probe"


def curves_table(saturation: Mapping[int | str, pd.Series], churn: Mapping[int | str, pd.Series]) -> pd.DataFrame:
    """A row for each layer and probe: layer, step, saturation, churn (null where undefined)."""
    frames = [
        pd.DataFrame(
            {
                "layer": layer,
                "step": one.index.to_numpy(np.int64),
                "saturation": one.to_numpy(np.float64),
                "churn": churn[layer].to_numpy(np.float64),
            }
        )
        for layer, one in saturation.items()
    ]
    return pd.concat(frames, ignore_index=True).astype({"saturation": "Float64", "churn": "Float64"})


def moves_table(fluctuation: pd.DataFrame, probes_P: np.ndarray) -> pd.DataFrame:
    """How many tokens moved last at which probe: a row for "never", then one for each probe but the last.

    fluctuation  of `Run.last_fluctuation`
    probes_P     steps of the probes, ascending
    """
    last_T = fluctuation["last_fluctuation"].to_numpy(np.float64, na_value=np.nan)
    rows = [("never", int(np.isnan(last_T).sum()))]
    rows += [(f"{step:,}", int((last_T == step).sum())) for step in probes_P[:-1].tolist()]
    frame = pd.DataFrame(rows, columns=["last probe with another first choice", "tokens"])
    frame["share (%)"] = 100 * frame["tokens"] / max(len(last_T), 1)
    return frame


def last_movers(fluctuation: pd.DataFrame, tokens: pd.DataFrame, most: int) -> pd.DataFrame:
    """The tokens whose first choice became final last, latest first; at most `most`.

    Columns: last other choice at (step), token, expert there, final expert; text, domain, sequence, position where
    recorded.

    fluctuation  of `Run.last_fluctuation`
    """
    moved = fluctuation[fluctuation["last_fluctuation"].notna()]
    moved = moved.sort_values(["last_fluctuation", "rank", "token"], ascending=[False, True, True]).head(most)
    moved = moved.rename(columns={"last_fluctuation": "last other choice at"} | _EXPERTS).reset_index(drop=True)
    frame = moved[["last other choice at", "rank", "token", *_EXPERTS.values()]].astype(
        dict.fromkeys(("last other choice at", "rank", "token"), "int64") | dict.fromkeys(_EXPERTS.values(), "Int64")
    )
    if len(tokens):
        about = tokens[["rank", "token", "text", "domain", "sequence", "position"]].copy()
        frame = frame.merge(about.astype({"rank": "int64", "token": "int64"}), on=["rank", "token"], how="left")
    if (frame["rank"] == 0).all():
        frame = frame.drop(columns="rank")
    return frame
