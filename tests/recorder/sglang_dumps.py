"""SGLang dumps made by hand, after its writer: no constant of the importer is used here."""

import torch

LAYERS, EXPERTS, TOP_K = 3, 4, 2
#: choices[layer][token]; layer 0 is dense. Of a prefill of two sequences (3 + 1 tokens).
CHOICES = {1: [[0, 1], [1, 2], [3, 0], [2, 3]], 2: [[3, 2], [3, 1], [3, 0], [0, 1]]}


def save(path, content):
    torch.save(content, str(path))
    return path


def identity_map(experts=EXPERTS):
    return torch.arange(experts).repeat(LAYERS, 1)


def counts(choices=CHOICES, experts=EXPERTS):
    table = torch.zeros(LAYERS, experts, dtype=torch.int32)
    for layer, tokens in choices.items():
        for ids in tokens:
            for expert in ids:
                table[layer, expert] += 1
    return table


def stat(path, *, slots=(3, 5), size=8):
    """A ring buffer of `size` forward passes; slot s in `slots` holds s times the counts."""
    buffer = torch.zeros(size, LAYERS, EXPERTS, dtype=torch.int32)
    for slot in slots:
        buffer[slot] = counts() * slot
    return save(path, {"rank": 0, "logical_count": buffer, "average_utilization_rate_over_window": None})


def per_pass_record(forward_pass_id, table, rank=0, **more):
    return {
        "forward_pass_id": forward_pass_id,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": table,
    } | more


def per_pass(path, records=None, physical=None):
    if records is None:
        records = [per_pass_record(7, counts()), per_pass_record(8, counts() * 2)]
    mapping = identity_map() if physical is None else physical
    return save(path, {"records": records, "last_physical_to_logical_map": mapping})


def token_record(forward_pass_id, choices=CHOICES, *, lengths=(3, 1), rank=0, slots=8, mode=1):
    """As the writer gathers it: a buffer of -1, into whose first columns each layer's top-k ids are copied."""
    tokens = len(next(iter(choices.values())))
    ids = torch.full((LAYERS, tokens, slots), -1, dtype=torch.int32)
    for layer, rows in choices.items():
        ids[layer, :, : len(rows[0])] = torch.tensor(rows, dtype=torch.int32)
    positions = [p for n in lengths for p in range(n)] if lengths else [11 + t for t in range(tokens)]
    return {
        "forward_pass_id": forward_pass_id,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": [100 + t for t in range(tokens)],
        "positions": positions,
        "extend_seq_lens": list(lengths) if lengths else None,
        "forward_mode": mode,
        "topk_ids_of_layer": ids,
        "misc_objects": [],
        "global_physical_count": counts(choices),
    }


def per_token(path, records=None, physical=None):
    if records is None:
        decode = {1: [[0, 1], [1, 2]], 2: [[3, 2], [3, 1]]}
        records = [token_record(4), token_record(5, decode, lengths=None, mode=2)]
    mapping = identity_map() if physical is None else physical
    return save(path, {"records": records, "last_physical_to_logical_map": mapping})
