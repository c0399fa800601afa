"""What a diagnosis says of a run, by rule, and the loads of its files to hold it against."""

import numpy as np
import pyarrow.parquet as pq

from recorder.diagnosis import diagnose
from recorder.reader import Run


def found(run, rule):
    return [finding for finding in diagnose(Run(run)) if finding.rule == rule]


def alarms(run):
    return [finding for finding in diagnose(Run(run)) if finding.level == "alarm"]


def file_loads(run, layer, phase="train"):
    frame = pq.read_table(run / "layer_stats").to_pandas(ignore_metadata=True)
    frame = frame[(frame["layer"] == layer) & (frame["phase"] == phase)].sort_values("step")
    return np.stack(frame["load"].to_list())


def file_shares(load, top_k):
    """Effective shares, written out: (exp(entropy) - k) / (E - k)."""
    share = load / load.sum(axis=-1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(axis=-1)
    return (np.exp(entropy) - top_k) / (load.shape[-1] - top_k)
