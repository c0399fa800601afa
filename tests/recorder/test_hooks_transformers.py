"""RoutingRecorder on models of transformers: masks of the model's own call, checkpointing, accumulation, generation."""

import copy
import pickle
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from recorder import RoutingRecorder

transformers = pytest.importorskip("transformers")

E, K, LAYERS = 4, 2, 3


def table(path, name):
    return pq.read_table(path / name).to_pandas()


def mixtral(**changes):
    torch.manual_seed(0)
    options = {
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": E, "num_experts_per_tok": K},
        **{"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None},
        **changes,
    }
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


class Overheard:
    """Ids and weights that the experts of each layer were really given, forward by forward."""

    def __init__(self, model):
        self.of_layer = {}
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                layer = int(name.split(".")[2])
                module.register_forward_pre_hook(lambda _, args, layer=layer: self._note(layer, args))

    def _note(self, layer, args):
        _, ids, weights = args
        self.of_layer.setdefault(layer, []).append((ids.clone(), weights.detach().clone()))


def load_of(ids):
    return np.bincount(ids.flatten().numpy(), minlength=E).tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_r4_r6_checkpointing_and_padding(tmp_path, side, use_reentrant):
    model = mixtral()
    model.train()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    overheard = Overheard(model)
    ids = torch.arange(1, 11).view(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    mask = mask if side == "left" else mask.flip(-1)
    with RoutingRecorder(model, tmp_path / "run", full_weights=True, tokens=True) as recorder, recorder.step(0):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        recorder.log(loss=loss)
    real = mask.flatten().bool()
    stats, decisions, tokens = (table(tmp_path / "run", t) for t in ("layer_stats", "decisions", "tokens"))
    assert stats.layer.tolist() == list(range(LAYERS))  # 3 records a step, not 6
    assert stats.tokens.tolist() == [8] * LAYERS
    for layer in range(LAYERS):
        seen, weights = overheard.of_layer[layer][0]  # the first pass; recomputation comes after
        assert stats.load[layer].tolist() == load_of(seen[real])
        assert sum(stats.load[layer]) == 16
        here = decisions[decisions.layer == layer]
        assert np.stack(here.experts).tolist() == seen[real].tolist()
        np.testing.assert_array_equal(np.stack(here.weights), weights[real].numpy())
        assert here.token.tolist() == np.flatnonzero(real).tolist()
    assert tokens.token_id.tolist() == ids.flatten()[real].tolist()
    assert table(tmp_path / "run", "steps").tokens.tolist() == [8]
    assert stats.aux_loss.isna().all()
    if use_reentrant is not None:
        assert len(overheard.of_layer[0]) == 2  # it was computed again


def test_accumulation_and_generation_inside_training(tmp_path):
    model = mixtral()
    overheard = Overheard(model)
    with RoutingRecorder(model, tmp_path / "run", tokens=True) as recorder, recorder.step(5):
        for length in (4, 6):  # two micro-batches, of different lengths
            batch = torch.randint(1, 32, (2, length))
            model(input_ids=batch, labels=batch).loss.backward()
        with recorder.step(5, phase="generate"):
            prompt = torch.tensor([[0, 3, 4], [5, 6, 7]])
            made = model.generate(
                prompt, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), max_new_tokens=4, do_sample=False
            )
    stats, tokens = table(tmp_path / "run", "layer_stats"), table(tmp_path / "run", "tokens")
    train, generated = stats[stats.phase == "train"], stats[stats.phase == "generate"]
    assert train.tokens.tolist() == [20] * LAYERS
    assert generated.tokens.tolist() == [5 + 2 * 3] * LAYERS  # the last token made is not routed
    for layer in range(LAYERS):
        both = torch.cat([ids for ids, _ in overheard.of_layer[layer][:2]])
        assert train.load.iloc[layer].tolist() == load_of(both)
    of_train = tokens[tokens.phase == "train"]
    assert of_train.sequence.tolist() == [0] * 4 + [1] * 4 + [2] * 6 + [3] * 6
    assert of_train.position.tolist() == [*range(4)] * 2 + [*range(6)] * 2
    # decoding goes on with the sequences of the prompt
    of_generation = tokens[tokens.phase == "generate"].sort_values(["sequence", "position"])
    assert of_generation.sequence.tolist() == [0] * 5 + [1] * 6
    assert of_generation.position.tolist() == [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert of_generation.token_id.tolist() == made[0, 1:-1].tolist() + made[1, :-1].tolist()
    assert set(of_generation.token) == set(range(12)) - {0}


def test_generation_outside_a_step_is_not_recorded(tmp_path):
    model = mixtral()
    with RoutingRecorder(model, tmp_path / "run") as recorder:
        with recorder.step(0):
            model(torch.ones(1, 3, dtype=torch.long))
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    assert table(tmp_path / "run", "layer_stats").tokens.tolist() == [3] * LAYERS


def test_encoder_and_decoder_see_tokens_of_their_own(tmp_path):
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        **{"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2},
        **{"num_heads": 2, "num_experts": E, "expert_capacity": 64, "num_sparse_encoder_layers": 1},
        **{"num_sparse_decoder_layers": 1, "decoder_start_token_id": 0, "pad_token_id": 0, "router_jitter_noise": 0.0},
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config)
    source, target = torch.randint(1, 32, (2, 5)), torch.randint(1, 32, (2, 3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with RoutingRecorder(model, tmp_path / "run", tokens=True) as recorder:
        with recorder.step(0):
            for _ in range(2):
                out = model(
                    input_ids=source, attention_mask=mask, labels=target,
                    decoder_attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
                )  # fmt: skip
                out.loss.backward()
        with recorder.step(0, phase="generate"):
            model.generate(source, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    stats, tokens = table(tmp_path / "run", "layer_stats"), table(tmp_path / "run", "tokens")
    layers = [layer for layer in recorder.writer.manifest["model"]["layers"] if layer["kind"] == "moe"]
    streams = {layer["router"]: layer["module"].split(".")[0] for layer in layers}
    for phase, encoded, decoded in (("train", 16, 10), ("generate", 8, 6)):
        of_phase = stats[stats.phase == phase]
        for router, count in zip(of_phase.router, of_phase.tokens, strict=True):
            assert count == (encoded if streams[router] == "encoder" else decoded), (phase, router)
    of_train = tokens[tokens.phase == "train"]
    assert of_train.token.is_unique
    assert of_train.token.max() == 20 + 12 - 2  # the last is padding
    assert sorted(set(of_train.sequence)) == list(range(8))
    assert of_train.token_id[of_train.sequence == 0].tolist() == source[0].tolist()
    assert of_train.token_id[of_train.sequence == 4].tolist() == [0, *target[0, :-1].tolist()]
    steps = table(tmp_path / "run", "steps")
    assert dict(zip(steps.phase, steps.tokens, strict=True)) == {"train": 26, "generate": 14}


def test_through_a_wrapper_that_hands_arguments_on(tmp_path):
    class Wrapper(torch.nn.Module):  # as DistributedDataParallel does
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs)

    model = mixtral()
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.arange(1, 11).view(2, 5)
    for number, attached in enumerate((Wrapper(model), model)):
        with RoutingRecorder(attached, tmp_path / f"{number}") as recorder, recorder.step(0):
            Wrapper(model)(ids, mask)
        stats = table(tmp_path / f"{number}", "layer_stats")
        assert stats.tokens.tolist() == [8] * LAYERS
        assert recorder.writer.manifest["model"]["layers"][0]["module"].startswith("model.layers.0")


def test_no_trace_after_close_and_copies_while_recording(tmp_path):
    model = mixtral()
    ids = torch.ones(1, 3, dtype=torch.long)

    def traces():
        return [
            (name, sorted(vars(module)), [len(hooks) for key, hooks in sorted(vars(module).items()) if "hooks" in key])
            for name, module in model.named_modules()
        ]

    before, saved = traces(), pickle.dumps(model)
    recorder = RoutingRecorder(model, tmp_path / "run")
    with recorder.step(0):
        model(ids)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(ids).logits, model(ids).logits)
    recorder.close()
    assert traces() == before
    assert len(pickle.dumps(model)) == len(saved)
    assert b"recorder" not in pickle.dumps(model)
    assert table(tmp_path / "run", "layer_stats").tokens.tolist() == [9] * LAYERS


@pytest.mark.parametrize("when", ["attached, then compiled", "compiled, then attached"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
def test_compiled_models_are_recorded(tmp_path, when, backend):
    torch.compiler.reset()
    model = mixtral()
    if when.startswith("compiled"):
        compiled = torch.compile(model, backend=backend)
        recorder = RoutingRecorder(compiled, tmp_path / "run")
    else:
        recorder = RoutingRecorder(model, tmp_path / "run")
        compiled = torch.compile(model, backend=backend)
    overheard = []
    ids = torch.randint(1, 32, (2, 5))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with warnings.catch_warnings(), recorder:
        warnings.filterwarnings("error", message="routescope")
        for step in range(3):
            with recorder.step(step):
                compiled(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    with torch.no_grad():
        plain = Overheard(model)
        torch.compiler.reset()
        model(input_ids=ids, attention_mask=mask)
        overheard = plain.of_layer
    stats = table(tmp_path / "run", "layer_stats")
    assert stats.step.tolist() == [0, 1, 2] * LAYERS
    assert set(stats.tokens) == {8}
    seen, _ = overheard[0][0]
    assert stats[stats.layer == 0].load.iloc[0].tolist() == load_of(seen[mask.flatten().bool()])


def test_compiled_and_run_before_attaching_warns_once(tmp_path):
    torch.compiler.reset()
    model = mixtral()
    compiled = torch.compile(model, backend="eager")
    ids = torch.ones(1, 3, dtype=torch.long)
    compiled(ids)
    recorder = RoutingRecorder(compiled, tmp_path / "run")
    with pytest.warns(RuntimeWarning, match="routers were not seen.*torch.compile") as caught:  # noqa: PT031
        for step in range(3):
            with recorder.step(step):
                compiled(ids)
    assert len([w for w in caught if "routescope" in str(w.message)]) == 1
    recorder.close()
    events = table(tmp_path / "run", "events")
    assert events.kind.tolist() == ["recorder_error"]
    assert table(tmp_path / "run", "steps").step.tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["eval mode", "without gradients"])
def test_what_is_no_training_inside_a_train_step_is_told(tmp_path, how):
    model = mixtral()
    model.train(how != "eval mode")
    with (  # noqa: PT031
        pytest.warns(RuntimeWarning, match=f"{how}.* inside a train step") as caught,
        torch.set_grad_enabled(how == "eval mode"),
        RoutingRecorder(model, tmp_path / "run") as recorder,
    ):
        for step in range(2):
            with recorder.step(step):
                model(torch.ones(1, 3, dtype=torch.long))
    assert len(caught) == 1
    assert table(tmp_path / "run", "events").kind.tolist() == ["mixed_phase"]
    assert recorder.writer.manifest["recorded"].get("errors") is None
