"""Which modules are taken for routers, where they stand in the model, and what their output may look like."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_core import MoELayer
from recorder import RoutingRecorder, Run, adapters
from recorder.adapters import Observation, RouterAdapter, find_routers, observed_routing, register_adapter
from recorder.describe import describe_model
from recorder.layer_places import plain_name

E, K, D = 6, 2, 8


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(adapters, "_adapters", dict(adapters._adapters))


class TripleGate(nn.Module):
    """(logits, weights, ids)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.top_k = E, K
        self.weight = nn.Parameter(torch.randn(E, D))

    def forward(self, x_TD: Tensor) -> Any:
        logits_TE = x_TD @ self.weight.T
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(K)
        return self.returned(logits_TE, weights_TK, ids_TK)

    def returned(self, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Any:
        return logits_TE, weights_TK, ids_TK


class ProbabilityGate(TripleGate):
    def returned(self, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Any:
        return logits_TE.softmax(-1), weights_TK, ids_TK


class DenseScoresGate(TripleGate):
    def returned(self, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Any:
        return torch.zeros_like(logits_TE).scatter(1, ids_TK, weights_TK), logits_TE


class BareGate(TripleGate):
    def returned(self, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Any:
        return logits_TE


class PairGate(TripleGate):
    def returned(self, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Any:
        return weights_TK, ids_TK


class Block(nn.Module):
    def __init__(self, gate: nn.Module, name: str = "gate") -> None:
        super().__init__()
        self.add_module(name, gate)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x_TD: Tensor) -> Tensor:
        gate = next(iter(self.children()))
        gate(x_TD)
        return x_TD


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        return x + getattr(out, "hidden", out)


class Model(nn.Module):
    """layers: one letter a layer, d dense or m MoE."""

    def __init__(self, layers: str, **others: nn.Module) -> None:
        super().__init__()
        self.layers = stack(layers)
        for name, module in others.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: str) -> nn.ModuleList:
    return nn.ModuleList(Layer(MoELayer(D, 4, 4, 1) if kind == "m" else nn.Linear(D, D)) for kind in layers)


GATES = [TripleGate, ProbabilityGate, DenseScoresGate, BareGate, PairGate]


@pytest.mark.parametrize("gate", GATES)
def test_r2_a_gate_without_an_adapter_is_refused_by_its_class(gate, tmp_path):
    with pytest.raises(ValueError, match=rf"the router gate is a {gate.__name__}, inside a Block.*register_adapter"):
        RoutingRecorder(Block(gate()), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "refused before anything is written"


class TripleAdapter(RouterAdapter):
    """As the docs have it: the few lines that a family of one's own takes."""

    classes = ("TripleGate",)

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        return {"num_experts": module.num_experts, "top_k": module.top_k, "score_function": "softmax"}

    def read(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Observation:
        logits_TE, weights_TK, ids_TK = output
        return Observation(
            routing=observed_routing(module, logits_TE=logits_TE, weights_TK=weights_TK, expert_ids_TK=ids_TK)
        )


@pytest.mark.parametrize("gate", [TripleGate, ProbabilityGate])
def test_r2_an_adapter_of_ones_own_in_a_few_lines(gate, tmp_path):
    """Its subclasses are read too; probabilities under the name of logits give the same run as the logits do."""
    register_adapter(TripleAdapter())
    torch.manual_seed(0)
    block, x_TD = Block(gate()), torch.randn(10, D)
    with RoutingRecorder(block, tmp_path / "run", full_weights=True) as recorder, recorder.step(0):
        block(x_TD)
    run = Run(tmp_path / "run")
    logits_TE = (x_TD @ block.gate.weight.T).detach()
    weights_TK, ids_TK = logits_TE.softmax(-1).topk(K)
    decisions, stats = run.decisions(0, 0), run.layer_stats().iloc[0]
    assert decisions.experts.to_list() == ids_TK.tolist()
    torch.testing.assert_close(torch.tensor(decisions.weights.to_list()), weights_TK)
    assert list(stats.load) == ids_TK.reshape(-1).bincount(minlength=E).tolist()
    torch.testing.assert_close(torch.tensor(list(stats.mean_prob)).float(), logits_TE.softmax(-1).mean(0))
    (layer,) = run.manifest["model"]["layers"]
    assert (layer["num_experts"], layer["top_k"], layer["balancer"], layer["expert_d_ff"]) == (E, K, None, None)


@pytest.mark.parametrize(
    ("given_TE", "turned"),
    [
        ([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]], True),
        ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], True),
        ([[0.7, 0.2, 0.1], [0.25, 0.25, 0.6]], False),
        ([[1.4, -0.2, -0.2], [0.25, 0.25, 0.5]], False),
        ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], False),
    ],
)
def test_r2_rows_that_are_all_positive_and_sum_to_1_are_not_logits(given_TE, turned):
    given_TE = torch.tensor(given_TE)
    ids_TK = given_TE.topk(2).indices
    routing = observed_routing(nn.Identity(), logits_TE=given_TE, weights_TK=ids_TK * 0.5, expert_ids_TK=ids_TK)
    torch.testing.assert_close(routing.scores_TE, given_TE if turned else given_TE.softmax(-1))
    assert turned == (not torch.equal(routing.logits_TE, given_TE))


@pytest.mark.parametrize("gate", [DenseScoresGate, BareGate, PairGate])
def test_r2_another_output_than_the_adapter_reads_is_named(gate):
    class MixtralTopKRouter(gate):  # under the name of a known class
        pass

    block = Block(MixtralTopKRouter())
    (site,) = find_routers(block)
    with pytest.raises(ValueError, match="MixtralTopKRouter returned . of shapes .*; its adapter reads"):
        site.adapter.read(site.module, (), {}, block.gate(torch.randn(5, D)))


def test_c22_invalid_rows_are_counted_apart():
    logits_TE = torch.randn(5, E)
    logits_TE[1] = torch.nan
    logits_TE[3, 2] = torch.nan
    logits_TE[4] = -torch.inf
    weights_TK, ids_TK = logits_TE.topk(K)
    routing = observed_routing(nn.Identity(), logits_TE=logits_TE, weights_TK=weights_TK, expert_ids_TK=ids_TK)
    assert routing.invalid_T.tolist() == [False, True, False, True, True]
    assert (routing.expert_ids_TK[routing.invalid_T] == -1).all()
    assert torch.equal(routing.expert_ids_TK[[0, 2]], ids_TK[[0, 2]])
    assert torch.isfinite(routing.scores_TE).all()
    assert (routing.weights_TK[routing.invalid_T] == 0).all()


def test_shapes_that_do_not_belong_together_are_named():
    ids_TK = torch.zeros(4, K, dtype=torch.long)
    with pytest.raises(ValueError, match=r"Identity gives logits \(5, 6\), weights \(4, 2\) and torch.int64 ids"):
        observed_routing(nn.Identity(), logits_TE=torch.randn(5, E), weights_TK=ids_TK * 1.0, expert_ids_TK=ids_TK)


@pytest.mark.parametrize("name", ["gate", "router", "choose"])
def test_what_looks_like_a_router_is_not_passed_over(name):
    """By its name or its class, beside experts; where others are known, too."""

    class TopKThing(nn.Linear):
        pass

    model = Model("dm", more=Block(TopKThing(D, E) if name == "choose" else nn.Linear(D, E), name))
    with pytest.raises(ValueError, match=rf"the router more\.{name} is a (Linear|TopKThing), inside a Block"):
        find_routers(model)


def test_gates_that_route_no_tokens_are_left_alone():
    class GatedMlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(D, D), nn.Linear(D, D)

    model = Model("dm", gated=GatedMlp())
    assert [site.name for site in find_routers(model)] == ["layers.1.mlp"]


def test_no_router_at_all_is_named():
    class LonelyGate(nn.Linear):
        pass

    with pytest.raises(ValueError, match="Sequential holds no MoELayer .*no routing to record"):
        find_routers(nn.Sequential(nn.Linear(D, D)))
    with pytest.raises(ValueError, match="if LonelyGate is a router, register an adapter"):
        find_routers(nn.Sequential(LonelyGate(D, D)))


@pytest.mark.parametrize("classes", [(), "TripleGate"])
def test_an_adapter_names_its_classes(classes):
    adapter = TripleAdapter()
    adapter.classes = classes
    with pytest.raises(ValueError, match=r"TripleAdapter\.classes is .*: name the module classes"):
        register_adapter(adapter)


R8 = "module._orig_mod.model.layers.3._checkpoint_wrapped_module.mlp.gate"


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        (R8, "model.layers.3.mlp.gate"),
        ("_fsdp_wrapped_module.model.layers.10._fsdp_wrapped_module.mlp.gate", "model.layers.10.mlp.gate"),
        ("model.layers.3.mlp.gate", "model.layers.3.mlp.gate"),
        ("module", ""),
    ],
)
def test_r8_prefixes_of_wrappers_are_removed(wrapped, plain):
    assert plain_name(wrapped) == plain


def test_r8_wrapped_models_keep_names_layers_and_order():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Around(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module  # as DistributedDataParallel holds it

    plain = Model("dmmdddddddmm")
    expected = [("layers.1.mlp", 1), ("layers.2.mlp", 2), ("layers.10.mlp", 10), ("layers.11.mlp", 11)]
    assert [(site.name, site.layer) for site in find_routers(plain)] == expected
    described = describe_model(plain)
    for index in (2, 10):
        plain.layers[index] = checkpoint_wrapper(plain.layers[index])
    wrapped = Around(torch.compile(plain, backend="eager"))
    sites = find_routers(wrapped)
    assert [(site.name, site.layer, site.router) for site in sites] == [(*e, i) for i, e in enumerate(expected)]
    assert describe_model(wrapped) == described


def test_a_second_container_of_layers_continues_after_the_first():
    """Layers for multi-token prediction behind a body whose own layers 0 and 2 are dense."""
    sites = find_routers(Model("dmdm", mtp=nn.ModuleDict({"layers": stack("dm")})))
    assert [(site.name, site.layer) for site in sites] == [
        *(("layers.1.mlp", 1), ("layers.3.mlp", 3)),
        ("mtp.layers.1.mlp", 5),
    ]
    described = describe_model(Model("dmdm", mtp=nn.ModuleDict({"layers": stack("dm")})))["layers"]
    assert [(layer["index"], layer["kind"]) for layer in described] == [(i, ("dense", "moe")[i % 2]) for i in range(6)]


def test_numbers_that_do_not_collide_stay():
    """A pipeline stage that holds layers 4 and 5 of the whole model, and a second container from 6 on."""
    first = nn.ModuleDict({"4": Layer(MoELayer(D, 4, 4, 1)), "5": Layer(nn.Linear(D, D))})
    second = nn.ModuleDict({"6": Layer(MoELayer(D, 4, 4, 1))})
    sites = find_routers(nn.ModuleDict({"layers": first, "more": second}))
    assert [(site.name, site.layer) for site in sites] == [("layers.4.mlp", 4), ("more.6.mlp", 6)]


def test_layers_of_nested_containers_are_counted_on():
    model = nn.ModuleDict({"stages": nn.ModuleList([stack("dm"), stack("mm")])})
    assert [(site.name, site.layer) for site in find_routers(model)] == [
        ("stages.0.1.mlp", 1),
        ("stages.1.0.mlp", 2),
        ("stages.1.1.mlp", 3),
    ]


def test_encoder_and_decoder_count_apart():
    model = nn.ModuleDict({"encoder": Model("dm"), "decoder": Model("mm")})
    assert [(s.stream, s.layer, s.router) for s in find_routers(model)] == [
        *(("encoder", 1, 0), ("decoder", 0, 1)),
        ("decoder", 1, 2),
    ]
    alone = nn.ModuleDict({"decoder": Model("mm")})
    assert [(s.stream, s.layer) for s in find_routers(alone)] == [("tokens", 0), ("tokens", 1)]


def test_finding_routers_imports_no_transformers():
    code = (
        "import sys, recorder.hooks, recorder.adapters, moe_core\n"
        "recorder.adapters.find_routers(moe_core.MoELayer(8, 8, 4, 1))\n"
        "assert not any(name.partition('.')[0] == 'transformers' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
