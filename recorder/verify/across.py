"""Checks across parts and tables, on the digests of their rows."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from recorder.catalog import TableReader
from recorder.schema import PHASES
from recorder.verify.expected import Expected
from recorder.verify.findings import Findings
from recorder.verify.rows import KEYS

#: Where fewer of a router's tokens have a number of experts other than K, these are faults; where more have, and the
#: number varies, the router has no K: experts choose their tokens, or each token how many experts it takes.
_SHARE_OF_FAULTS = 0.05
_GROUP = ["rank", "segment", "phase"]
_NO_STEP = -1


@dataclass
class Across:
    """The digests of a run's tables, as `Checker.digest` makes them, each with a column `file`."""

    expected: Expected
    findings: Findings
    readers: dict[str, TableReader]
    digests: dict[str, pd.DataFrame]

    def check(self) -> None:
        """Everything that one batch of rows cannot tell."""
        steps, stats = self.digests["steps"], self.digests["layer_stats"]
        self._last = self._settled_until(steps)
        self._check_repeated("steps", ["writer", *KEYS])  # processes that see the same tokens write a row each
        self._check_repeated("layer_stats", [*KEYS, "router"])
        decisions = self._joined_blocks("decisions", [*KEYS, "router"])
        tokens = self._joined_blocks("tokens", KEYS)
        varying = self._check_choices(self.digests["decisions"])
        wrong = stats["wrong_sum"].to_numpy(dtype=bool) & ~stats["router"].isin(varying).to_numpy()
        self._add(stats, wrong, "load does not sum to tokens * top_k")
        stats = stats.drop_duplicates([*KEYS, "router"])
        for digest, table in ((stats, "layer_stats"), (decisions, "decisions"), (tokens, "tokens")):
            self._check_has_steps(digest, steps, table)
        self._check_routers(stats, steps)
        self._check_loads(decisions, stats)
        self._check_decision_routers(decisions)
        self._check_tokens(decisions, tokens)
        self._check_last_step()

    def _add(self, digest: pd.DataFrame, wrong: np.ndarray, fault: str) -> None:
        shown = [name for name in (*KEYS, "router") if name in digest]
        for file, rows in digest.loc[wrong].groupby("file", sort=False):
            self.findings.add_rows(str(file), fault, rows[shown])

    def _miss(self, table: str, digest: pd.DataFrame, missing: np.ndarray | None, fault: str) -> None:
        """Rows that no part of a table has."""
        shown = [name for name in (*KEYS, "router") if name in digest]
        self.findings.add_rows(table, fault, digest[shown], missing)

    def _settled_until(self, steps: pd.DataFrame) -> pd.Series:
        """The last step by rank, segment and phase of which all rows must be there: `steps` rows come last.

        Where several processes write for one rank, the one that got least far decides.
        """
        by_writer = steps.groupby([*_GROUP, "writer"])["step"].max()
        last = by_writer.groupby(level=_GROUP).min()
        if self.expected.closed:
            final = last.index.get_level_values("segment") == self.expected.segment
            last[final] = np.iinfo(np.int64).max
        return last

    def _settled(self, digest: pd.DataFrame) -> np.ndarray:
        """Whether a key's rows in all tables were written, bool, one a row of the digest."""
        if not len(digest):
            return np.zeros(0, dtype=bool)
        closed = self.expected.closed & (digest["segment"] == self.expected.segment)
        otherwise = np.where(closed, np.iinfo(np.int64).max, _NO_STEP)
        last = self._last.reindex(pd.MultiIndex.from_frame(digest[_GROUP])).to_numpy(dtype=np.float64)
        return np.asarray(digest["step"] <= np.where(np.isnan(last), otherwise, last))

    def _check_repeated(self, table: str, keys: list[str]) -> None:
        digest = self.digests[table]
        self._add(digest, digest.duplicated(keys).to_numpy(), "a row of this key is there already")

    def _joined_blocks(self, table: str, keys: list[str]) -> pd.DataFrame:
        """One row a key, and a fault where blocks of one key share a token; those keys are left out."""
        digest = self.digests[table]
        sums = [name for name in ("count", "token_print", "load_print") if name in digest]
        joined = digest.groupby(keys, sort=False, as_index=False).agg(
            {**dict.fromkeys(sums, "sum"), "low": "min", "high": "max", "file": "last"}
        )
        several = digest.loc[digest.duplicated(keys, keep=False)].sort_values([*keys, "low"], kind="stable")
        same = (several[keys].to_numpy()[1:] == several[keys].to_numpy()[:-1]).all(axis=1)
        overlaps = same & (several["low"].to_numpy()[1:] <= several["high"].cummax().to_numpy()[:-1])
        suspects = several.iloc[np.flatnonzero(overlaps) + 1].drop_duplicates(keys)
        repeated = suspects.loc[[self._has_repeated(table, row) for _, row in suspects.iterrows()]]
        latest = repeated[keys].merge(digest, on=keys).drop_duplicates(keys, keep="last")
        self._add(latest, np.ones(len(latest), dtype=bool), "rows are in an earlier part too")
        return _without(joined, repeated, keys)

    def _has_repeated(self, table: str, key: pd.Series) -> bool:
        tokens = self._tokens_of(table, key)
        return len(np.unique(tokens)) < len(tokens)

    def _tokens_of(self, table: str, key: pd.Series) -> np.ndarray:
        """The token numbers of one key, read again."""
        equals = {name: int(key[name]) for name in ("rank", "segment", "step")}
        columns = ["step", "phase", "rank", "segment", "token"]
        if "router" in key.index:
            columns += ["layer", "router"]
        rows = self.readers[table].scan(columns, phase=PHASES[key["phase"]], **equals)
        tokens: np.ndarray = rows["token"].to_numpy()
        return tokens[self.expected.routers(rows) == key["router"]] if "router" in key.index else tokens

    def _check_choices(self, decisions: pd.DataFrame) -> list[int]:
        """Routers that have no K; the others' tokens must have K experts each."""
        by_router = decisions.groupby("router").agg({"odd": "sum", "count": "sum", "few": "min", "many": "max"})
        varies = (by_router["odd"] >= _SHARE_OF_FAULTS * by_router["count"]) & (by_router["few"] < by_router["many"])
        varying = by_router.index[varies].tolist()
        wrong = (decisions["odd"] > 0) & ~decisions["router"].isin(varying)
        self._add(decisions, wrong.to_numpy(dtype=bool), "tokens have another number of experts than top_k")
        return varying

    def _check_has_steps(self, digest: pd.DataFrame, steps: pd.DataFrame, table: str) -> None:
        if not len(digest):
            return
        if not len(steps):
            if self.expected.closed:
                self.findings.add("steps", f"there are no rows, but there are some in {table}")
            return
        self._miss("steps", digest, self._settled(digest) & ~_has(digest, steps, KEYS), f"no row for what {table} has")

    def _check_routers(self, stats: pd.DataFrame, steps: pd.DataFrame) -> None:
        """Each settled step has a row of each router that its rank has rows of; and no router has none at all."""
        busy = steps.loc[(steps["tokens"] != 0) & self._settled(steps)].drop_duplicates(KEYS)
        every = self.expected.recorded.get("stats_every")
        train = (busy["phase"] == PHASES.index("train")).to_numpy()
        if not isinstance(every, int) or every < 1:
            due = _has(busy, stats, KEYS)  # not told which steps were meant to have some
        else:
            due = ~train | (busy["step"] % every == 0).to_numpy() | _has(busy, stats, KEYS)
        missing = _missing_routers(busy.loc[due], stats)
        self._miss("layer_stats", missing, None, "no row of a router for a step")
        lost = sorted(set(self.expected.layer_of) - set(stats["router"]))
        alone = self.expected.closed or self.expected.world_size in (None, 1)  # a killed rank takes its routers along
        if len(busy) and due.any() and lost and alone:
            names = ", ".join(map(str, lost))
            self.findings.add("layer_stats", f"no rows of router {names}, which run.json lists")

    def _check_decision_routers(self, decisions: pd.DataFrame) -> None:
        settled = decisions.loc[self._settled(decisions)]
        missing = _missing_routers(settled.drop_duplicates(KEYS), settled)
        self._miss("decisions", missing, None, "no rows of a router for a step that other routers have rows of")

    def _check_loads(self, decisions: pd.DataFrame, stats: pd.DataFrame) -> None:
        names = ["tokens", "invalid", "load_print", "whole", "file"]
        both = decisions.merge(stats[[*KEYS, "router", *names]], on=[*KEYS, "router"], suffixes=("", "_stats"))
        if not len(both):
            return
        both = both.loc[self._settled(both)]
        told = (both["tokens"] >= 0).to_numpy()
        seen = (both["tokens"] + both["invalid"]).to_numpy()
        over = told & (both["count"].to_numpy() > seen)
        self._add(both, over, "there are more decisions than layer_stats has tokens")
        differs = told & (both["count"].to_numpy() == seen) & both["whole"].to_numpy(dtype=bool)
        differs &= both["load_print"].to_numpy() != both["load_print_stats"].to_numpy()
        fault = "load is not what the decisions of all tokens add up to"
        self._add(both.assign(file=both["file_stats"]), differs, fault)

    def _check_tokens(self, decisions: pd.DataFrame, tokens: pd.DataFrame) -> None:
        """`tokens` has a row for each token that any router has decisions of, and for no other."""
        decisions = decisions.loc[self._settled(decisions)]
        if self.expected.imported and not len(tokens):
            return
        without = ~_has(decisions, self.digests["tokens"], KEYS)
        self._miss("tokens", decisions, without, "no rows for what decisions has")
        # Routers that see the same tokens have the same print; encoder and decoder have two prints that add up.
        streams = decisions.drop_duplicates([*KEYS, "count", "token_print"])
        sums = streams.groupby(KEYS, as_index=False).agg({"count": "sum", "token_print": "sum"})
        both = sums.merge(tokens, on=KEYS, suffixes=("_decided", ""))
        same = (both["count_decided"] == both["count"]) & (both["token_print_decided"] == both["token_print"])
        for _, key in both.loc[~same].iterrows():
            known, decided = self._tokens_of("tokens", key[KEYS]), []
            for _, row in decisions.loc[_has(decisions, key[KEYS].to_frame().T, KEYS)].iterrows():
                decided.append(self._tokens_of("decisions", row[[*KEYS, "router"]]))
                if not np.isin(decided[-1], known).all():
                    self._add(row.to_frame().T, np.ones(1, bool), "token numbers have no row in tokens")
            if not self.expected.imported and not np.isin(known, np.concatenate(decided)).all():
                self._add(key.to_frame().T, np.ones(1, bool), "token numbers have no decisions")

    def _check_last_step(self) -> None:
        last_step = self.expected.manifest.get("last_step")
        if self.expected.status not in ("finished", "cancelled") or not isinstance(last_step, int):
            return
        last = [
            int(rows["step"].max())
            for digest in self.digests.values()
            if len(rows := digest.loc[(digest["segment"] == self.expected.segment) & (digest["writer"] == 0)])
        ]
        if last and max(last) != last_step:
            self.findings.add("run.json", f"last_step is {last_step}, but the rows go on to step {max(last)}")
        elif not last and not any(len(digest) for digest in self.digests.values()):
            self.findings.add("run.json", f"last_step is {last_step}, but there are no rows")


def _missing_routers(steps: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The keys of `steps`, and a router, of which `rows` has none, though it has some in that rank and phase."""
    routers = rows[[*_GROUP, "router"]].drop_duplicates()
    wanted = steps[KEYS].merge(routers, on=_GROUP)
    return wanted.loc[~_has(wanted, rows, [*KEYS, "router"])]


def _has(rows: pd.DataFrame, others: pd.DataFrame, keys: list[str]) -> np.ndarray:
    """Whether `others` has the key of each row, bool."""
    known = others[keys].drop_duplicates().astype(np.int64)
    found = rows[keys].astype(np.int64).merge(known, on=keys, how="left", indicator=True)
    return np.asarray(found["_merge"] == "both")


def _without(rows: pd.DataFrame, others: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    return rows.loc[~_has(rows, others, keys)]
