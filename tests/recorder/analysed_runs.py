"""Runs with tokens, domains, drops and probes for the tests of the analysis, and the slow way to the same answers."""

from collections import Counter, defaultdict

import numpy as np
from toy_runs import NEVER, layer, model

from recorder.writer import RunWriter

LAYERS = (layer(1, 0, 6, 2), layer(3, 1, 5, 2), layer(4, 2, 6, 2))
DOMAINS = ("code", "prose", None)
SEQUENCES, LENGTH = 4, 8


def log_moment(writer, step, seed, phase="train", tokens=SEQUENCES * LENGTH, named=True, layers=LAYERS):
    """Random decisions of one step, some without a choice, some dropped, and its tokens."""
    rng = np.random.default_rng(seed)
    for item in layers:
        ids = np.argsort(rng.random((tokens, item["num_experts"])), axis=1)[:, : item["top_k"]]
        ids[rng.random(ids.shape) < 0.05] = -1
        kept = rng.random(ids.shape) < 0.9 if item["router"] == 1 else None
        place = {"phase": phase, "layer": item["index"], "router": item["router"]}
        writer.log_decisions(step, **place, experts_TK=ids, weights_TK=np.ones(ids.shape), kept_TK=kept)
        load = np.bincount(ids[ids >= 0], minlength=item["num_experts"])
        rest = {"gate_mass": load / 2, "mean_prob": load / load.sum(), "router_entropy": float(rng.random())}
        writer.log_layer_stats(step, **place, tokens=tokens, load=load, **rest)
    if named:
        token_ids = rng.integers(0, 7, tokens)
        domains = np.array(DOMAINS, dtype=object)[rng.integers(0, 3, tokens)]
        at = np.arange(tokens)
        writer.log_tokens(
            step,
            phase=phase,
            sequence_T=at // LENGTH,
            position_T=at % LENGTH,
            token_id_T=token_ids,
            text_T=[f"<{token_id}>" for token_id in token_ids],
            domain_T=list(domains),
        )


def record(path, steps=range(6), probes=(0, 2, 5), seed=0, flush_every=2, **options):
    """A run whose parts hold `flush_every` steps each; not compacted, so that there are several."""
    writer = RunWriter(path, manifest=model(*LAYERS), flush_steps=flush_every, **(NEVER | options))
    for step in steps:
        log_moment(writer, step, 1000 * seed + step)
        if step in probes:
            log_moment(writer, step, 1000 * seed + 500 + step, "probe")
        writer.log_step(step, tokens=SEQUENCES * LENGTH, loss=1.0)
    return writer


def rows_of(run, phase):
    """Every decision with its token, one at a time: (step, layer, router, rank, token, experts, kept, token row)."""
    found = []
    for step in run.decision_steps(phase).tolist():
        tokens = {(row.rank, row.token): row for row in run.tokens(step, phase).itertuples()}
        for item in run.moe_layers:
            for row in run.decisions(step, item["index"], phase, router=item["router"]).itertuples():
                kept = None if row.kept is None or np.ndim(row.kept) == 0 else list(row.kept)
                token = tokens.get((row.rank, row.token))
                found.append((step, row.layer, row.router, row.rank, row.token, list(row.experts), kept, token))
    return found


def slow_answers(run, phase="train"):
    """What the tables must say, counted one decision at a time: {table: Counter}."""
    answers = defaultdict(Counter)
    order = [item["router"] for item in run.moe_layers]
    by_token = {}
    for step, layer_, router, rank, token, experts, kept, row in rows_of(run, phase):
        by_token[step, rank, token, router] = (experts, row)
        at = (layer_, router)
        for a in experts:
            if a >= 0:
                answers["load"][*at, a] += 1
                for b in experts:
                    if b >= 0:
                        answers["coactivation"][*at, a, b] += 1
        if experts[0] >= 0:
            answers["first_choices"][*at, experts[0]] += 1
        if row is None:
            continue
        for slot, a in enumerate(experts):
            if a >= 0:
                if isinstance(row.domain, str):
                    answers["domains"][*at, row.domain, a] += 1
                answers["vocabulary"][*at, row.token_id, a] += 1
                if kept is not None:
                    answers["assignments"][*at, row.position] += 1
                    answers["dropped"][*at, row.position] += not kept[slot]
        if any(a >= 0 for a in experts):
            answers["occurrences"][*at, row.token_id] += 1
            if isinstance(row.domain, str):
                answers["domain_tokens"][*at, row.domain] += 1
    layer_of = {item["router"]: item["index"] for item in run.moe_layers}
    by_place = {
        (step, rank, row.sequence, row.position, router): experts
        for (step, rank, _, router), (experts, row) in by_token.items()
        if row is not None
    }
    for (step, rank, sequence, position, router), experts in by_place.items():
        before = by_place.get((step, rank, sequence, position - 1, router))
        if before is not None and before[0] >= 0 and experts[0] >= 0:
            answers["pairs"][layer_of[router], router] += 1
            answers["repeats"][layer_of[router], router] += before[0] == experts[0]
    for (step, rank, token, router), (experts, _) in by_token.items():
        after = order[order.index(router) + 1 :][:1]
        if after and (step, rank, token, after[0]) in by_token:
            for a in experts:
                for b in by_token[step, rank, token, after[0]][0]:
                    if a >= 0 and b >= 0:
                        answers["transitions"][layer_of[router], router, a, b] += 1
    return {name: {key: count for key, count in counts.items() if count} for name, counts in answers.items()}


def answers_of(analysis, phase="train"):
    """The analysis' tables in the same form."""
    found = defaultdict(dict)

    def note(name, key, count):
        if count:
            found[name][key] = count

    def rows(table):
        for row in analysis.table(table, phase=phase).to_pylist():
            yield (row["layer"], row["router"]), row

    for at, row in rows("loads"):
        for expert, (load, first) in enumerate(zip(row["load"], row["first_choices"], strict=True)):
            note("load", (*at, expert), load)
            note("first_choices", (*at, expert), first)
    for at, row in rows("coactivation"):
        for other, count in enumerate(row["together"]):
            note("coactivation", (*at, row["expert"], other), count)
    for at, row in rows("transitions"):
        for other, count in enumerate(row["to"]):
            note("transitions", (*at, row["expert"], other), count)
    for at, row in rows("domains"):
        note("domain_tokens", (*at, row["domain"]), row["tokens"])
        for expert, count in enumerate(row["load"]):
            note("domains", (*at, row["domain"], expert), count)
    for at, row in rows("vocabulary"):
        assert row["text"] == f"<{row['token_id']}>"
        assert row["counts"] == sorted(row["counts"], reverse=True)
        note("occurrences", (*at, row["token_id"]), row["occurrences"])
        for expert, count in zip(row["experts"], row["counts"], strict=True):
            note("vocabulary", (*at, row["token_id"], expert), count)
    for at, row in rows("repeats"):
        note("repeats", at, row["repeats"])
        note("pairs", at, row["pairs"])
    for at, row in rows("positions"):
        note("assignments", (*at, row["position"]), row["assignments"])
        note("dropped", (*at, row["position"]), row["dropped"])
    return dict(found)


def slow_settling(run):
    """{(layer, router, step): (saturation, churn)} and {(layer, router, rank, token): last fluctuation}."""
    steps = run.decision_steps("probe").tolist()
    settling, last = {}, {}
    for item in run.moe_layers:
        at = (item["index"], item["router"])
        probes = [
            {
                (row.rank, row.token): list(row.experts)
                for row in run.decisions(step, at[0], "probe", router=at[1]).itertuples()
            }
            for step in steps
        ]

        def overlap(now, reference):
            shares = [
                len({a for a in now[key] if a >= 0} & set(experts)) / sum(a >= 0 for a in experts)
                for key, experts in reference.items()
                if key in now and any(a >= 0 for a in experts)
            ]
            return sum(shares) / len(shares)

        for i, step in enumerate(steps):
            churn = None if i == 0 else 1 - overlap(probes[i], probes[i - 1])
            settling[*at, step] = (overlap(probes[i], probes[-1]), churn)
        for key, experts in probes[-1].items():
            if experts[0] >= 0:
                other = [step for step, probe in zip(steps, probes, strict=True) if probe[key][0] != experts[0]]
                last[*at, *key] = max(other, default=None)
    return settling, last
