"""Every family of transformers, from a tiny config, trained with the recorder on: what the run holds is compared with
what the model's experts were given."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

from hf_experts import Seen
from hf_models import FAMILIES, tiny

from recorder import RoutingRecorder, Run
from recorder.adapter_families import FAMILIES as KNOWN
from recorder.adapters import find_routers
from recorder.describe import describe_model

ASKED_FOR = list(FAMILIES)[:13]
BATCH, LENGTH = 2, 9


def mask_of(side: str | None) -> Tensor | None:
    if side is None:
        return None
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, slice(0, 2) if side == "left" else slice(LENGTH - 2, LENGTH)] = 0
    return mask


def checkpointed(model: Any, use_reentrant: bool) -> None:
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    else:  # as one does by hand
        for layer in model.model.layers:
            layer.forward = recomputed(layer.forward, use_reentrant)


def recomputed(forward: Any, use_reentrant: bool) -> Any:
    return lambda *args, **kwargs: checkpoint(partial(forward, **kwargs), *args, use_reentrant=use_reentrant)


def train_and_compare(
    family: str,
    path: Any,
    side: str | None,
    use_reentrant: bool | None,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Run:
    model = tiny(family).to(dtype)
    seen = Seen(model)
    if use_reentrant is not None:
        checkpointed(model, use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    mask = mask_of(side)
    told = {} if mask is None else {"attention_mask": mask}
    names = {site.router: site.name.rpartition(".")[0] for site in find_routers(model)}
    with RoutingRecorder(model, path, full_weights=True, flush_seconds=1e9) as recorder:
        for step in range(steps):
            input_ids = torch.randint(3, 48, (BATCH, LENGTH))
            with recorder.step(step, **told):
                with seen.open():
                    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False, **told).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.isfinite(loss)
    run = Run(path)
    real_T = np.ones(BATCH * LENGTH, bool) if mask is None else mask.reshape(-1).bool().numpy()
    assert set(names.values()) == set(seen.weights_TE), "a router without experts, or the other way round"
    rows = {row["router"]: row for row in run.manifest["model"]["layers"] if row["kind"] == "moe"}
    for router, name in names.items():
        layer, num_experts = rows[router]["index"], rows[router]["num_experts"]
        stats = run.layer_stats(layer).query("router == @router")
        assert len(stats) == steps
        for step in range(steps):
            decisions = run.decisions(step, layer, router=router)
            ids_TK = np.stack(decisions.experts.to_list())
            weights_TK = np.stack(decisions.weights.to_list())
            assert ids_TK.shape == (real_T.sum(), rows[router]["top_k"])
            kept_TK = np.ones_like(ids_TK, bool)
            if decisions.kept.notna().all():
                kept_TK = np.stack(decisions.kept.to_list()).astype(bool)
            weights_TE = np.zeros((len(ids_TK), num_experts), np.float32)
            np.put_along_axis(weights_TE, ids_TK, np.where(kept_TK, weights_TK, 0), 1)
            np.testing.assert_allclose(
                weights_TE,
                seen.weights_TE[name][step].numpy()[real_T],
                rtol=0 if family != "llama4" else 1e-4,
                atol=1e-6,
            )
            chosen_TE = np.zeros_like(weights_TE)
            np.put_along_axis(chosen_TE, ids_TK, kept_TK.astype(np.float32), 1)
            by_hand_TE = seen.chosen_TE[name][step].numpy()[real_T]
            np.testing.assert_array_equal(chosen_TE, by_hand_TE)
            row = stats[stats.step == step].iloc[0]
            dropped_E = np.asarray(row.dropped) if isinstance(row.dropped, list | np.ndarray) else 0
            np.testing.assert_array_equal(np.asarray(row.load) - dropped_E, by_hand_TE.sum(0))
            assert sum(row.load) == row.tokens * rows[router]["top_k"] == real_T.sum() * rows[router]["top_k"]
            assert row.invalid == 0
    assert run.layer_stats().aux_loss.isna().all(), "these models compute no loss for one router alone"
    assert run.layer_stats().z_loss.isna().all()
    return run


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ASKED_FOR])
def test_a_family_that_comes_along(family, tmp_path):
    train_and_compare(family, tmp_path / "run", side="left", use_reentrant=None)


@pytest.mark.parametrize(
    ("side", "use_reentrant"),
    [(None, None), ("left", True), ("right", False)],
    ids=["plain", "R4-reentrant-R6-left", "R4-not-reentrant-R6-right"],
)
@pytest.mark.parametrize("family", ASKED_FOR)
def test_ids_weights_and_loads_are_those_of_the_model(family, side, use_reentrant, tmp_path):
    if family == "switch":
        side = None  # encoder and decoder tokens are not the same
    train_and_compare(family, tmp_path / "run", side, use_reentrant)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss", "dbrx", "switch"])
def test_in_bfloat16_too(family, tmp_path):
    train_and_compare(family, tmp_path / "run", None, None, dtype=torch.bfloat16)


def test_r1_dense_layers_are_counted_and_a_missing_loss_is_null(tmp_path):
    run = train_and_compare("deepseek-v3", tmp_path / "run", None, None)
    layers = run.manifest["model"]["layers"]
    assert [(layer["index"], layer["kind"]) for layer in layers] == [(0, "dense"), (1, "moe"), (2, "moe")]
    assert [layer["module"] for layer in layers] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp.gate",
        "model.layers.2.mlp.gate",
    ]
    assert sorted(set(run.layer_stats().layer)) == [1, 2]
    assert run.layer_stats().aux_loss.isna().all()


@pytest.mark.parametrize("family", ["deepseek-v3", "ernie4-5-moe", "minimax-m2", "lfm2-moe", "longcat-flash"])
def test_best_first_the_bias_used_and_what_it_rerouted(family, tmp_path):
    model = tiny(family)
    site = find_routers(model)[0]
    caught: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        caught.update(args=args, output=output, observation=site.adapter.read(module, args, kwargs, output))

    site.module.register_forward_hook(keep, with_kwargs=True)
    model(input_ids=torch.randint(3, 48, (BATCH, LENGTH)))
    routing = caught["observation"].routing
    biases = [b for name, b in model.named_buffers() if "correction_bias" in name or name.endswith("expert_bias")]
    biases += [p for name, p in model.named_parameters() if "correction_bias" in name]
    bias_E = biases[0].detach().reshape(-1).float()
    torch.testing.assert_close(routing.expert_bias_E, bias_E, rtol=0, atol=0)
    assert routing.expert_bias_E.data_ptr() != biases[0].data_ptr(), "R13: a copy, for it changes in place"
    softmax = family in ("ernie4-5-moe", "longcat-flash")
    scores_TE = caught["output"][0].detach().float()
    scores_TE = scores_TE.softmax(-1) if softmax else scores_TE.sigmoid()
    ranked_TK = (scores_TE + bias_E).gather(1, routing.expert_ids_TK)
    assert (ranked_TK.diff(dim=1) <= 0).all()
    in_reach_TE = scores_TE
    if family == "deepseek-v3":  # 2 groups of 4, of which a token uses the one with the better two
        groups_TGM = scores_TE.view(-1, 2, 4)
        first_T = groups_TGM.sort(-1).values[..., -2:].sum(-1).argmax(-1)
        in_reach_TE = torch.where(torch.arange(8)[None] // 4 == first_T[:, None], scores_TE, 0)
    plain = [set(row.topk(2).indices.tolist()) for row in in_reach_TE]
    moved = sum(len(set(row.tolist()) - p) for row, p in zip(routing.expert_ids_TK, plain, strict=True))
    from moe_core.routing import rerouted_assignments

    assert rerouted_assignments(routing) == moved > 0


def test_gemma_hands_back_probabilities_and_they_are_turned_into_logits():
    model = tiny("gemma4")
    site = find_routers(model)[0]
    caught: dict[str, Any] = {}
    site.module.register_forward_hook(
        lambda module, args, kwargs, output: caught.update(
            probs=output[0], routing=site.adapter.read(module, args, kwargs, output).routing
        ),
        with_kwargs=True,
    )
    site.module.proj.register_forward_hook(lambda module, args, output: caught.update(logits=output.detach()))
    model(input_ids=torch.randint(3, 48, (BATCH, LENGTH)))
    torch.testing.assert_close(caught["routing"].scores_TE, caught["probs"].detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        caught["routing"].logits_TE.log_softmax(-1), caught["logits"].float().log_softmax(-1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("phimoe", "switch")])
def test_scores_are_what_the_weights_were_made_of(family):
    """Softmax and sigmoid differ in the ratios of a token's weights, whatever they were divided by or scaled with."""
    model = tiny(family)
    routings = []
    for site in find_routers(model):
        read = site.adapter.read
        site.module.register_forward_hook(
            lambda *given, read=read: routings.append(read(*given).routing), with_kwargs=True
        )
    model(input_ids=torch.randint(3, 48, (BATCH, LENGTH)))
    for routing in routings:
        scores_TK = routing.scores_TE.gather(1, routing.expert_ids_TK)
        ratio_TK = routing.weights_TK / routing.weights_TK.sum(1, keepdim=True)
        torch.testing.assert_close(ratio_TK, scores_TK / scores_TK.sum(1, keepdim=True), rtol=1e-4, atol=1e-5)
        assert ratio_TK.std() > 0.02, "weights that are all alike would tell nothing"


READ_NOT_RUN = {  # in models of pictures and text: the router of each is a copy of one that was trained above
    "DeepseekOcr2TextTopkRouter": "deepseek_ocr2",
    "UnlimitedOcrTextTopkRouter": "unlimited_ocr",
    "Glm4vMoeTextTopkRouter": "glm4v_moe",
    "Qwen3VLMoeTextTopKRouter": "qwen3_vl_moe",
}


def test_every_class_of_the_registry_is_trained_here_or_a_copy_of_one_that_is():
    trained = {type(site.module) for family in FAMILIES for site in find_routers(tiny(family))}
    forwards = {inspect.getsource(kind.forward) for kind in trained}
    for name, module in READ_NOT_RUN.items():
        router = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
        assert inspect.getsource(router.forward) in forwards, name
    known = {name for adapter in KNOWN for name in adapter.classes}
    assert known == {kind.__name__ for kind in trained} | set(READ_NOT_RUN)


@pytest.mark.parametrize("family", [name for name in ASKED_FOR if name not in ("jetmoe", "switch")])
def test_reading_a_router_waits_for_no_device(family):
    """On the meta device there are no values to wait for: whatever asks for one raises."""
    model = tiny(family)
    sites = find_routers(model)
    outputs: dict[int, Any] = {}
    for site in sites:
        site.module.register_forward_hook(
            lambda module, args, output, r=site.router: outputs.update({r: (args, output)})
        )
    model(input_ids=torch.randint(3, 48, (BATCH, LENGTH)))
    model.to("meta")
    for site in sites:
        args, output = outputs[site.router]
        args, output = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, output))
        routing = site.adapter.read(site.module, args, {}, output).routing
        assert routing.expert_ids_TK.shape[0] == BATCH * LENGTH


EXPERTS = {  # parameters of all routed experts of one router, by hand: E * matrices * d_model * expert width
    "mixtral": (6 * 3 * 32 * 24, 2 / 6),
    "deepseek-v3": (8 * 3 * 32 * 16, 2 / 8),
    "gpt-oss": (6 * (3 * 32 * 24 + 2 * 24 + 32), 2 / 6),
    "dbrx": (6 * 3 * 32 * 24, 2 / 6),
    "llama4": (6 * 3 * 32 * 24, 2 / 6),
    "switch": (4 * 2 * 32 * 24, 1 / 4),
    "gemma4": (6 * 3 * 32 * 16, 2 / 6),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_parameters_by_hand(family):
    model = tiny(family)
    described = describe_model(model)
    experts, share = EXPERTS[family]
    moe = [layer for layer in described["layers"] if layer["kind"] == "moe"]
    total = sum(p.numel() for p in model.parameters())
    assert described["parameters_total"] == total
    assert described["parameters_active"] == total - round(len(moe) * experts * (1 - share))
    assert {layer["parameters_total"] - layer["parameters_active"] for layer in moe} == {round(experts * (1 - share))}
    assert (described["d_model"], described["vocab_size"]) == (32, 48)
    assert {layer["expert_d_ff"] for layer in moe} == {16 if family in ("deepseek-v3", "gemma4") else 24}


def test_jetmoe_has_two_routers_in_a_layer_whose_counts_add_up():
    model = tiny("jetmoe")
    layers = describe_model(model)["layers"]
    assert [(layer["index"], layer["router"]) for layer in layers] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert [layer["module"].split(".", 3)[3] for layer in layers[:2]] == ["mlp.router", "self_attention.experts.router"]
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    assert sum(layer["block_parameters_total"] for layer in layers[:2]) == block


def test_encoder_and_decoder_share_indices_and_differ_by_router_and_stream():
    sites = find_routers(tiny("switch"))
    assert [(site.stream, site.layer, site.router) for site in sites] == [
        *(("encoder", 1, 0), ("encoder", 3, 1)),
        *(("decoder", 1, 2), ("decoder", 3, 3)),
    ]


def test_capacity_drops_are_marked_and_keep_their_id(tmp_path):
    model = tiny("switch", expert_capacity=1)
    ids = torch.randint(3, 48, (BATCH, LENGTH))
    logits = []
    model.encoder.block[1].layer[1].mlp.router.classifier.register_forward_hook(lambda *a: logits.append(a[2].detach()))
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        model(input_ids=ids, labels=ids)
    decisions = Run(tmp_path / "run").decisions(0, 1, router=0)
    wanted_BS = logits[0].argmax(-1)
    assert np.stack(decisions.experts.to_list())[:, 0].tolist() == wanted_BS.reshape(-1).tolist()
    first_BS = [[e not in row[:i] for i, e in enumerate(row)] for row in wanted_BS.tolist()]
    assert [bool(kept[0]) for kept in decisions.kept] == [first for row in first_BS for first in row]


@pytest.mark.parametrize(("output_router_logits", "balancer"), [(False, None), (True, "aux")])
def test_an_aux_loss_is_named_where_it_is_computed(output_router_logits, balancer):
    layers = describe_model(tiny("mixtral", output_router_logits=output_router_logits, router_aux_loss_coef=0.02))[
        "layers"
    ]
    assert {layer["balancer"] for layer in layers} == {balancer}
    assert {layer["score_function"] for layer in layers} == {"softmax"}


def test_a_selection_bias_is_named():
    layers = describe_model(tiny("deepseek-v3"))["layers"]
    assert [layer["balancer"] for layer in layers] == [None, "expert bias", "expert bias"]
    assert [layer["score_function"] for layer in layers] == [None, "sigmoid", "sigmoid"]
    assert [layer["num_shared_experts"] for layer in layers] == [None, 1, 1]


def test_a_router_of_transformers_that_is_not_known_is_refused_by_its_class():
    import transformers

    config = transformers.NllbMoeConfig(
        vocab_size=48, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_experts=4, encoder_sparse_step=2,
        decoder_sparse_step=2, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"encoder\.layers\.1\.ffn\.router is a NllbMoeTop2Router, .*register_adapter"):
        find_routers(transformers.NllbMoeModel(config))
