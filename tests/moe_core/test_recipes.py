"""Each recipe: what defines it, against values computed here; that it trains, records and comes back from its state."""

import copy
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

from moe_core import LatentMoELayer, MoELayer, SwitchAuxLoss, recipes
from moe_core.balancers import attach_balancers
from moe_core.collection import collect_loads
from moe_core.dispatchers import make_dispatcher
from recorder.hooks import RoutingRecorder

SMALL = {"vocab_size": 40, "d_model": 32, "num_heads": 2, "d_ff": 32, "num_layers": 2}
NAMES = ["three-tier", "noisy-top-k", "stable-latent", "sorted-swiglu", "switch", "mixtral", "deepseek-v3", "olmoe"]
every_recipe = pytest.mark.parametrize("name", NAMES)


def layer_of(name, seed=0, tokens=48, **changes):
    """A layer with logits worth telling apart, and tokens for it."""
    torch.manual_seed(seed)
    layer = recipes.build_layer(name, d_model=32, d_ff=32, router_init_std=0.3, **changes)
    return layer, torch.randn(tokens, 32)


def load_of(routing):
    return np.bincount(routing.expert_ids_TK.flatten().numpy(), minlength=routing.num_experts)


def aux_by_hand(probs_TE, load_E):
    return load_E.size * float((load_E / load_E.sum() * probs_TE.mean(0)).sum())


def test_the_catalog():
    assert list(recipes.RECIPES) == NAMES
    for name, recipe in recipes.RECIPES.items():
        assert recipe.name == name
        assert 0 < len(recipe.summary) <= 120
        assert "\n" not in recipe.summary


def test_an_unknown_recipe_names_the_known_ones():
    for build in (recipes.build, recipes.build_layer, recipes.config, lambda name: recipes.train(name, [])):
        with pytest.raises(ValueError, match="'mixtrel' is unknown; choose one of three-tier, .*olmoe"):
            build("mixtrel")


def test_changes_go_before_the_recipe():
    config = recipes.config("mixtral", vocab_size=10, num_experts=4, d_model=16)
    assert (config.num_experts, config.top_k, config.d_model) == (4, 2, 16)
    with pytest.raises(ValueError, match="top_k=9.*num_experts=8"):
        recipes.build_layer("mixtral", top_k=9)


@every_recipe
def test_trains_in_one_call(name):
    torch.manual_seed(0)
    batch = torch.randint(40, (4, 12))
    model, history = recipes.train(name, [batch] * 8, lr=1e-2, **SMALL)
    losses = [losses["loss"] for losses in history]
    assert losses[-1] < 0.8 * losses[0]
    assert all(math.isfinite(value) for losses in history for value in losses.values())
    assert losses[0] == pytest.approx(sum(v for part, v in history[0].items() if part != "loss"), rel=1e-5)
    assert all(p.isfinite().all() for p in model.parameters())


@every_recipe
def test_learns_the_toy_regression_as_a_layer(name):
    layer, _ = layer_of(name)
    target = torch.randn(32, 32) / 32**0.5
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    attach_balancers(layer, optimizer)
    errors = []
    for _ in range(30):
        x = torch.randn(128, 32)
        out = layer(x)
        error = F.mse_loss(out.hidden, torch.tanh(x @ target))
        optimizer.zero_grad()
        (error + sum(out.losses.values())).backward()
        optimizer.step()
        errors.append(error.item())
    assert np.mean(errors[-5:]) < 0.9 * np.mean(errors[:5])


@every_recipe
def test_records(name, tmp_path):
    model = recipes.build(name, **SMALL)
    ids = torch.randint(40, (2, 9))
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0, token_ids=ids):
        out = model(ids, labels=ids)
        recorder.log(loss=out.loss, **out.losses)
    entries = [entry for entry in recorder.writer.manifest["model"]["layers"] if entry["kind"] == "moe"]
    config = model.config
    assert [entry["index"] for entry in entries] == list(config.moe_layers)
    for entry in entries:
        assert (entry["num_experts"], entry["top_k"]) == (config.num_experts, config.top_k)
        assert (entry["latent_size"], entry["num_shared_experts"]) == (config.latent_size, config.num_shared_experts)
        assert (entry["balancer"], entry["score_function"]) == (config.balancer, config.score_function)
        assert entry["activation"] == config.activation
    stats = pq.read_table(tmp_path / "run" / "layer_stats").to_pandas()
    assert stats.layer.tolist() == list(config.moe_layers)
    for layer, load in zip(stats.layer, stats.load, strict=True):
        assert load.tolist() == load_of(out.routings[layer]).tolist()
    decisions = pq.read_table(tmp_path / "run" / "decisions")
    assert len(decisions) == 18 * len(stats)


@every_recipe
def test_state_comes_back_and_the_next_update_is_the_same(name):
    torch.manual_seed(0)
    batches = [torch.randint(40, (2, 12)) for _ in range(4)]

    def train(model, optimizer, batches):
        handle = attach_balancers(model, optimizer)
        for step, ids in enumerate(batches):
            torch.manual_seed(step)  # the router's noise
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        handle.remove()

    model = recipes.build(name, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, batches[:2])
    twin = recipes.build(name, **SMALL)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, batches[2:])
    train(twin, twin_optimizer, batches[2:])
    for key, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key


class TestThreeTier:
    def test_selection_sees_the_bias_and_weights_do_not(self):
        layer, x = layer_of("three-tier")
        bias = torch.linspace(-1, 1, 8)
        layer.balancer.expert_bias.copy_(bias)
        routing = layer(x).routing
        assert layer.router.bias is None
        logits = (x @ layer.router.weight.T).detach()
        chosen = (logits + bias).topk(2).indices
        assert torch.equal(routing.expert_ids_TK, chosen)
        torch.testing.assert_close(routing.weights_TK, logits.gather(1, chosen).softmax(-1))
        assert not torch.equal(chosen, logits.topk(2).indices)  # the bias really chose

    def test_the_teaching_variant_weighs_with_the_bias_too(self):
        plain, x = layer_of("three-tier")
        teaching, _ = layer_of("three-tier", bias_in_weights=True)
        assert torch.equal(plain(x).routing.weights_TK, teaching(x).routing.weights_TK)  # while the bias is zero
        bias = torch.linspace(-1, 1, 8)
        teaching.balancer.expert_bias.copy_(bias)
        routing = teaching(x).routing
        corrected = (x @ teaching.router.weight.T + bias).detach()
        torch.testing.assert_close(routing.weights_TK, corrected.topk(2).values.softmax(-1))

    def test_the_switch_says_why_it_is_off(self):
        for text in (recipes.recipe("three-tier").description, type(layer_of("three-tier")[0].router).__doc__):
            said = " ".join(text.split())
            assert "bias_in_weights" in said
            assert "not the default" in said.lower()

    def test_shared_experts_are_always_on(self):
        layer, x = layer_of("three-tier", num_shared_experts=2)
        with torch.no_grad():
            out = layer(x)
            routed = make_dispatcher("naive")(x, out.routing, layer.experts)
            torch.testing.assert_close(out.hidden - routed, layer.shared(x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("tokens", [0, 1, 2, 40])
    def test_its_dispatch_handles_no_one_and_many_tokens(self, tokens):
        layer, x = layer_of("three-tier", tokens=tokens)
        layer.balancer.expert_bias.copy_(torch.tensor([9.0, 0, 0, 0, 0, 0, 0, -9]))  # all to one, none to another
        assert layer.dispatcher is make_dispatcher("masked")
        out = layer(x)
        load = load_of(out.routing)
        assert (load[0], load[7]) == (tokens, 0)
        expected = make_dispatcher("naive")(x, out.routing, layer.experts) + layer.shared(x)
        torch.testing.assert_close(out.hidden, expected, rtol=1e-4, atol=1e-5)
        out.hidden.sum().backward()
        assert all(p.grad is None for p in layer.experts[7].parameters())

    def test_the_bias_follows_the_layer_and_stands_in_its_checkpoint(self):
        layer, x = layer_of("three-tier")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        attach_balancers(layer, optimizer)
        load = load_of(layer(x).routing)
        optimizer.step()
        delta = 1e-3 * np.sign(load.mean() - load)
        expected = delta - delta.mean()
        np.testing.assert_allclose(layer.balancer.expert_bias, expected, atol=1e-8)
        np.testing.assert_allclose(layer.state_dict()["balancer.expert_bias"], expected, atol=1e-8)
        assert layer.to("meta").balancer.expert_bias.device.type == "meta"
        assert layer.balancer.expert_bias.dtype == torch.float32


class TestNoisyTopK:
    def test_noise_in_training_only(self):
        layer, x = layer_of("noisy-top-k", tokens=2000)
        logits = (x @ layer.router.weight.T).detach()
        routing = layer.eval()(x).routing
        assert torch.equal(routing.expert_ids_TK, logits.topk(2).indices)
        torch.testing.assert_close(routing.weights_TK, logits.topk(2).values.softmax(-1))
        noisy = layer.train()(x).routing
        assert not torch.equal(noisy.expert_ids_TK, routing.expert_ids_TK)
        torch.testing.assert_close(noisy.logits_TE, logits)  # losses see none of it
        # softmax over two: weight = sigmoid(difference), so the noise of the difference has std 0.1 * sqrt(2)
        seen = noisy.weights_TK[:, 0].logit() - (
            logits.gather(1, noisy.expert_ids_TK[:, :1]) - logits.gather(1, noisy.expert_ids_TK[:, 1:])
        ).squeeze(1)
        apart = logits.topk(3).values
        clear = (apart[:, 0] - apart[:, 1] > 0.8) & (apart[:, 1] - apart[:, 2] > 0.8)  # noise cannot reorder these
        assert clear.sum() > 100
        assert seen[clear].std().item() == pytest.approx(0.1 * 2**0.5, rel=0.2)

    @pytest.mark.parametrize("kind", ["aux", "soft-aux"])
    def test_its_two_losses_are_reported_apart(self, kind):
        layer, x = layer_of("noisy-top-k", balancer=f"{kind}+z", aux_coef=0.25, z_coef=0.125)
        out = layer(x)
        logits = (x @ layer.router.weight.T).detach().double().numpy()
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        aux = aux_by_hand(probs, load_of(out.routing)) if kind == "aux" else 8 * float((probs.mean(0) ** 2).sum())
        assert set(out.losses) == {"aux_loss", "z_loss"}
        assert out.losses["aux_loss"].item() == pytest.approx(0.25 * aux, rel=1e-5)
        z = float((np.log(np.exp(logits).sum(1)) ** 2).mean())
        assert out.losses["z_loss"].item() == pytest.approx(0.125 * z, rel=1e-5)

    def test_gelu_experts_in_every_nth_layer_of_a_whole_transformer(self):
        model = recipes.build("noisy-top-k", **SMALL | {"num_layers": 6, "moe_frequency": 3})
        assert [isinstance(block.mlp, MoELayer) for block in model.layers] == [False, False, True] * 2
        expert = model.layers[2].mlp.experts[0]
        x = torch.randn(3, 32)
        torch.testing.assert_close(expert(x), F.gelu(x @ expert.up.T) @ expert.down.T)
        ids = torch.randint(40, (2, 5))
        out = model(ids, labels=ids)
        assert set(out.losses) == {"ce_loss", "aux_loss", "z_loss"}


class TestStableLatent:
    def test_its_parts(self):
        layer, x = layer_of("stable-latent", num_shared_experts=3)
        assert isinstance(layer, LatentMoELayer)
        assert layer.latent_norm is not None
        assert layer.dispatcher is make_dispatcher("grouped")
        expert, h = layer.experts[0], torch.randn(5, layer.latent_size) * 20
        gate, up = (h @ expert.gate_up.T).chunk(2, -1)
        situ = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        torch.testing.assert_close(expert(h), situ @ expert.down.T, rtol=1e-4, atol=1e-4)
        assert sum(p.numel() for p in layer.shared.parameters()) == 3 * 32 * (3 * 32)  # one network, three wide
        routing = layer(x).routing
        torch.testing.assert_close(routing.scores_TE, torch.sigmoid(x @ layer.router.weight.T))
        torch.testing.assert_close(routing.weights_TK.sum(-1), torch.full((48,), 2.5))

    def test_its_router_computes_in_float32(self):
        layer, x = layer_of("stable-latent")
        out = layer.to(torch.bfloat16)(x.bfloat16())
        assert out.hidden.dtype == torch.bfloat16
        assert out.routing.logits_TE.dtype == torch.float32
        exact = x.bfloat16().float() @ layer.router.weight.float().T
        torch.testing.assert_close(out.routing.logits_TE, exact, rtol=1e-5, atol=1e-5)

    def test_renormalisation_and_norm_can_be_switched_off(self):
        layer, x = layer_of("stable-latent", renormalize=False, latent_norm=False)
        routing = layer(x).routing
        chosen = routing.scores_TE.gather(1, routing.expert_ids_TK)
        torch.testing.assert_close(routing.weights_TK, 2.5 * chosen)
        assert layer.latent_norm is None

    def test_select_then_update_the_bias(self):
        layer, _ = layer_of("stable-latent")
        E, K = layer.num_experts, layer.top_k
        for _ in range(3):
            x = torch.randn(200, 32)
            before = layer.balancer.expert_bias.clone()
            routing = layer(x).routing
            assert torch.equal(routing.expert_bias_E, before)  # this forward selected with the old one
            scores = routing.scores_TE.detach().double().numpy()
            ranked = np.sort(scores + before.double().numpy(), axis=1)[:, ::-1]
            new = np.quantile(ranked[:, K, None] - scores, K / E, axis=0, method="higher")
            np.testing.assert_allclose(layer.balancer.expert_bias, new - new.mean(), atol=1e-6)
            assert not torch.equal(layer.balancer.expert_bias, before)

    def test_evaluation_leaves_the_bias_alone(self):
        layer, x = layer_of("stable-latent")
        layer(x)
        before = layer.balancer.expert_bias.clone()
        layer.eval()
        layer(x + 1)
        assert torch.equal(layer.balancer.expert_bias, before)

    def test_the_collection_context_sees_only_while_it_is_open(self):
        model = recipes.build("stable-latent", **SMALL)
        batches = [torch.randint(40, (2, 9)) for _ in range(4)]
        model(batches[0])
        with collect_loads(model) as collected:
            biases = []
            outs = []
            for ids in batches[1:3]:
                biases.append([block.mlp.balancer.expert_bias.clone() for block in model.layers])
                outs.append(model(ids, labels=ids))
            outs[-1].loss.backward()
        loads, snapshots = copy.deepcopy(collected.loads), copy.deepcopy(collected.biases)
        model(batches[3])
        for layer in range(2):
            name = f"layers.{layer}.mlp"
            expected = sum(load_of(out.routings[layer]) for out in outs)
            assert loads[name].tolist() == expected.tolist()
            assert torch.equal(snapshots[name], torch.stack([biases[0][layer], biases[1][layer]]))
            assert torch.equal(collected.loads[name], loads[name])  # nothing was added after it closed
            assert torch.equal(collected.biases[name], snapshots[name])
        assert all(not module._forward_hooks for module in model.modules())

    def test_the_collection_context_with_recomputation_and_without_biases(self):
        model = recipes.build("mixtral", **SMALL, activation_checkpointing=True)
        ids = torch.randint(40, (2, 9))
        with collect_loads(model) as collected:
            out = model(ids, labels=ids)
            out.loss.backward()
        assert collected.biases == {}
        for layer in range(2):
            assert collected.loads[f"layers.{layer}.mlp"].sum() == 36
        with pytest.raises(ValueError, match="Linear holds no MoELayer"), collect_loads(torch.nn.Linear(2, 2)):
            pass


class TestSortedSwiGLU:
    def test_its_parts(self):
        layer, x = layer_of("sorted-swiglu")
        assert layer.dispatcher is make_dispatcher("sorted")
        out = layer(x)
        logits = (x @ layer.router.weight.T).detach().double()
        top = logits.softmax(-1).topk(2)
        expected = (top.values / top.values.sum(-1, keepdim=True)).float()
        torch.testing.assert_close(out.routing.weights_TK, expected)
        assert out.losses["aux_loss"].item() == pytest.approx(
            0.01 * aux_by_hand(logits.softmax(-1).numpy(), load_of(out.routing)), rel=1e-5
        )
        assert isinstance(layer.balancer, SwitchAuxLoss)
        routed = torch.zeros_like(x)
        for t in range(len(x)):
            for e, weight in zip(top.indices[t].tolist(), expected[t], strict=True):
                routed[t] += weight * layer.experts[e](x[t : t + 1])[0]
        torch.testing.assert_close(out.hidden, routed + layer.shared(x), rtol=1e-4, atol=1e-5)

    def test_a_pre_norm_block_with_attention(self):
        block = recipes.build("sorted-swiglu", **SMALL).layers[0]
        x = torch.randn(2, 5, 32)
        hidden, routing, losses = block(x, None)
        after = x + block.attention(F.rms_norm(x, (32,)), None)  # norms start with weight 1
        torch.testing.assert_close(hidden, after + block.mlp(F.rms_norm(after, (32,))).hidden)
        assert routing.top_k == 2
        assert set(losses) == {"aux_loss"}


class TestSwitch:
    def test_one_expert_weighted_by_its_probability_and_capacity(self):
        layer, x = layer_of("switch", tokens=256)
        routing = layer(x).routing
        probs = (x @ layer.router.weight.T).softmax(-1)
        assert torch.equal(routing.expert_ids_TK[:, 0], probs.argmax(-1))
        torch.testing.assert_close(routing.weights_TK[:, 0], probs.max(-1).values)
        capacity = math.ceil(256 / 16 * 1.25)
        seen = np.zeros(16, int)
        for t, e in enumerate(routing.expert_ids_TK[:, 0].tolist()):
            assert routing.kept_TK[t, 0].item() == (seen[e] < capacity)
            seen[e] += 1
        assert seen.max() > capacity

    def test_the_router_learns_from_the_task_alone(self):
        layer, x = layer_of("switch", aux_coef=0.0)
        layer(x).hidden.square().sum().backward()
        assert layer.router.weight.grad.any()

    def test_every_second_layer(self):
        config = recipes.config("switch", vocab_size=10, num_layers=6)
        assert config.moe_layers == (1, 3, 5)
        assert layer_of("switch")[0].balancer.coefficients == {"aux_loss": 0.01}


class TestMixtral:
    def test_softmax_over_the_two_selected_logits(self):
        layer, x = layer_of("mixtral")
        routing = layer(x).routing
        top = (x @ layer.router.weight.T).topk(2)
        assert torch.equal(routing.expert_ids_TK, top.indices)
        torch.testing.assert_close(routing.weights_TK, top.values.softmax(-1))
        assert (layer.num_experts, layer.shared, layer.capacity_factor, layer.activation) == (8, None, None, "swiglu")
        assert layer.balancer.coefficients == {"aux_loss": 0.02}
        assert recipes.config("mixtral", vocab_size=10, num_layers=3).moe_layers == (0, 1, 2)


class TestDeepSeekV3:
    def test_groups_bias_and_weights(self):
        layer, x = layer_of("deepseek-v3")
        bias = torch.randn(16) * 0.2
        layer.balancer.parts[0].expert_bias.copy_(bias)
        routing = layer(x).routing
        scores = torch.sigmoid(x @ layer.router.weight.T).detach()
        for t in range(len(x)):
            corrected = (scores[t] + bias).view(4, 4)
            best_groups = corrected.topk(2, dim=-1).values.sum(-1).topk(2).indices.tolist()
            allowed = [e for e in range(16) if e // 4 in best_groups]
            chosen = sorted(allowed, key=lambda e: -corrected.flatten()[e].item())[:4]
            assert routing.expert_ids_TK[t].tolist() == chosen
            raw = scores[t][chosen]
            torch.testing.assert_close(routing.weights_TK[t], 2.5 * raw / raw.sum())

    def test_sequence_aux_loss(self):
        layer, _ = layer_of("deepseek-v3")
        x = torch.randn(3, 10, 32)
        out = layer(x)
        scores = torch.sigmoid(x @ layer.router.weight.T).detach().double().numpy()
        probs = scores / scores.sum(-1, keepdims=True)
        ids = out.routing.expert_ids_TK.view(3, 40).numpy()
        per_sequence = [aux_by_hand(probs[b], np.bincount(ids[b], minlength=16)) for b in range(3)]
        assert out.losses["aux_loss"].item() == pytest.approx(1e-4 * np.mean(per_sequence), rel=1e-5)

    def test_layout_and_the_bias_moves_at_the_optimizer_step(self):
        model = recipes.build("deepseek-v3", **SMALL | {"num_layers": 3})
        assert model.config.moe_layers == (1, 2)
        assert model.layers[1].mlp.num_shared_experts == 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach_balancers(model, optimizer)
        ids = torch.randint(40, (2, 9))
        out = model(ids, labels=ids)
        out.loss.backward()
        for index in (1, 2):
            bias = model.layers[index].mlp.state_dict()
            assert not any(value.any() for name, value in bias.items() if name.endswith("expert_bias"))
        optimizer.step()
        for index in (1, 2):
            load = load_of(out.routings[index])
            delta = 1e-3 * np.sign(load.mean() - load)
            bias = model.layers[index].mlp.balancer.selection_bias(torch.zeros(1, 32))
            np.testing.assert_allclose(bias, delta - delta.mean(), atol=1e-8)


class TestOLMoE:
    def test_raw_probabilities_of_eight_of_sixty_four(self):
        layer, x = layer_of("olmoe")
        out = layer(x)
        probs = (x @ layer.router.weight.T).softmax(-1)
        top = probs.topk(8)
        assert torch.equal(out.routing.expert_ids_TK, top.indices)
        torch.testing.assert_close(out.routing.weights_TK, top.values)
        assert (layer.num_experts, layer.shared, layer.router.renormalize) == (64, None, False)
        assert layer.balancer.coefficients == {"aux_loss": 0.01, "z_loss": 0.001}
