"""What run.json promises of the rows, and whether its own numbers go together."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from recorder.manifest import STATUSES, run_status
from recorder.verify.findings import Findings

_MOST = 2**31 - 1  # the columns `rank` and `segment` hold no more


class Expected:
    """What the manifest says of routers, ranks and segments; what it leaves open is learned from the rows.

    Attributes:
        status: as a reader shows it: running, finished, cancelled, failed or unfinished.
        closed: the run was ended properly, so that everything recorded is there.
        imported: made from another program's dump, which tells what it tells: decisions may be of tokens that it
            does not place, and tokens without decisions.
        segment: the last one.
        world_size: number of ranks, or None.
        layer_of: each router's layer, as far as the manifest lists them.
        experts: E by router; those the manifest leaves open come from the first load that is seen.
        top_k: K by router, where the manifest has one.
    """

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.manifest = manifest
        self.status = run_status(dict(manifest))
        self.closed = self.status in STATUSES[1:]
        self.imported = str(manifest.get("source") or "").startswith("import")
        self.segment = _number(manifest.get("segment")) or 0
        self.world_size = _number(manifest.get("world_size"))
        self.recorded: dict[str, Any] = manifest.get("recorded") or {}
        layers = (manifest.get("model") or {}).get("layers") or []
        self.moe_layers = [layer for layer in layers if layer.get("kind", "moe") == "moe"]
        numbered = [layer for layer in self.moe_layers if layer.get("router") is not None]
        self.layer_of: dict[int, int] = {layer["router"]: layer["index"] for layer in numbered}
        self.experts: dict[int, int] = {layer["router"]: layer["num_experts"] for layer in numbered if _e(layer)}
        self.top_k: dict[int, int] = {layer["router"]: layer["top_k"] for layer in numbered if layer.get("top_k")}
        self._router_of = {layer["index"]: layer["router"] for layer in numbered}

    def check_manifest(self, findings: Findings) -> None:
        """Faults of run.json by itself."""
        for name, least in (("world_size", 1), ("segment", 0)):
            value = self.manifest.get(name)
            if value is not None and (_number(value) is None or value < least):
                findings.add("run.json", f"{name} is {ascii(value)[:80]}, not a whole number of at least {least}")
        if self.manifest.get("status") not in STATUSES:
            findings.add("run.json", f"status is {self.manifest.get('status')!r}, not one of {', '.join(STATUSES)}")
        if len(self.layer_of) < sum(layer.get("router") is not None for layer in self.moe_layers):
            findings.add("run.json", "two layers have routers of the same number")
        for layer in self.moe_layers:
            num_experts, top_k = layer.get("num_experts"), layer.get("top_k")
            if num_experts is not None and num_experts < 1:
                findings.add("run.json", f"layer {layer['index']} has num_experts {num_experts}")
            elif top_k is not None and not 1 <= top_k <= (num_experts or top_k):
                findings.add("run.json", f"layer {layer['index']} has top_k {top_k} of {num_experts} experts")

    def routers(self, rows: pa.Table) -> np.ndarray:
        """The router of each row, int64; a writer that numbers none has one a layer."""
        layers = rows["layer"].fill_null(-1).to_numpy().astype(np.int64)
        if "router" not in rows.column_names:
            missing = np.ones(rows.num_rows, dtype=bool)
            routers = np.zeros(rows.num_rows, dtype=np.int64)
        else:
            missing = rows["router"].is_null().to_numpy()
            routers = rows["router"].fill_null(0).to_numpy().astype(np.int64)
        if missing.any():
            routers = routers.copy()
            routers[missing] = [self._router_of.get(layer, layer) for layer in layers[missing].tolist()]
        return routers

    def by_router(self, known: Mapping[int, int], routers: np.ndarray) -> np.ndarray:
        """Each row's value of `experts` or `top_k`, int64; 0 where it is not known."""
        numbers, places = np.unique(routers, return_inverse=True)
        return np.array([known.get(number, 0) for number in numbers.tolist()], dtype=np.int64)[places]


def _e(layer: Mapping[str, Any]) -> bool:
    return bool(layer.get("num_experts"))


def _number(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and abs(value) <= _MOST else None
