"""Routed-experts arrays of vLLM and SGLang: what a server returns, saved by a person, becomes decisions."""

import base64
import io
import json
import zipfile

import numpy as np
import pytest

from recorder.importers import DumpError, import_dump
from recorder.importers import arrays as arrays_module
from recorder.reader import Run

E, K, L = 8, 2, 3
CONFIG = {"model_type": "toy", "num_hidden_layers": L, "num_experts": E, "num_experts_per_tok": K}


def ids(tokens, *, layers=L, seed=0, dtype=np.int32):
    """Distinct experts for every token; never the pair (0, 0), which stands for nothing captured."""
    draw = np.random.default_rng(seed)
    order = np.argsort(draw.random((tokens, layers, E)), axis=2)
    return np.ascontiguousarray(order[:, :, :K].astype(dtype))


def npy_base64(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def imported(kind, file, tmp_path, **options):
    return Run(import_dump(kind, file, tmp_path / "runs", **options))


def decisions(run, step, layer):
    return np.array(run.decisions(step, layer, "generate")["experts"].tolist())


def holds(run, requests):
    """Every layer of every request (a step each) as given, and its load by counting."""
    assert run.decision_steps("generate").tolist() == list(range(len(requests)))
    for step, array in enumerate(requests):
        for layer in range(array.shape[1]):
            np.testing.assert_array_equal(decisions(run, step, layer), array[:, layer])
            counted = np.bincount(array[:, layer].ravel(), minlength=E)
            np.testing.assert_array_equal(run.load(layer, "generate")[step], counted)
    assert run.steps("generate")["tokens"].tolist() == [len(array) for array in requests]


def config(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(tmp_path / "config.json")


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.uint8, ">i8"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_npy_is_one_request(tmp_path, kind, dtype):
    array = ids(50, dtype=dtype)
    np.save(tmp_path / "a.npy", array)
    run = imported(kind, tmp_path / "a.npy", tmp_path)
    holds(run, [array])
    assert run.manifest["source"] == f"import: {'vLLM' if kind == 'vllm' else 'SGLang'} routed experts"
    assert run.tokens(0, "generate")["position"].tolist() == list(range(50))
    assert any("a step is a request" in message for message in run.events()["message"])
    frame = run.layer_stats(phase="generate")
    assert frame["gate_mass"].isna().all()
    assert frame["mean_prob"].isna().all()
    assert frame["invalid"].isna().all()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_a_request_an_array(tmp_path, save):
    requests = [ids(5), ids(1, seed=1), ids(30, seed=2)]
    save(tmp_path / "a.npz", *requests)
    holds(imported("vllm", tmp_path / "a.npz", tmp_path), requests)


def test_blocks_of_tokens_join(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays_module, "_BLOCK_IDS", 7 * L * K)
    array = ids(50)
    np.save(tmp_path / "a.npy", array)
    run = imported("vllm", tmp_path / "a.npy", tmp_path)
    holds(run, [array])
    assert run.decisions(0, 1, "generate")["token"].tolist() == list(range(50))


def test_nested_lists_of_the_first_api(tmp_path):
    """v0.21: the prompt's routing once in the response, the rest with each choice; -1 where a prefix was cached."""
    prompt, first, second = ids(4), ids(3, seed=1), ids(2, seed=2)
    prompt[:2] = -1
    response = {
        "id": "cmpl-1",
        "prompt_routed_experts": prompt.tolist(),
        "choices": [
            {"index": 0, "routed_experts": first.tolist(), "prompt_token_ids": [1, 2, 3, 4], "token_ids": [5, 6, 7]},
            {"index": 1, "routed_experts": second.tolist()},
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps(response))
    run = imported("vllm", tmp_path / "a.json", tmp_path, token_ids=True)
    assert run.steps("generate")["tokens"].tolist() == [5, 4]
    np.testing.assert_array_equal(decisions(run, 0, 2), np.concatenate([prompt[2:, 2], first[:, 2]]))
    assert run.decisions(0, 2, "generate")["token"].tolist() == [2, 3, 4, 5, 6]
    assert run.tokens(0, "generate")["token_id"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert run.tokens(1, "generate")["token_id"].isna().all()


def test_base64_npy_of_later_apis(tmp_path):
    requests = [ids(6), ids(9, seed=3)]
    lines = [json.dumps({"choices": [{"routed_experts": npy_base64(array)}]}) for array in requests]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    holds(imported("vllm", tmp_path / "a.jsonl", tmp_path), requests)
    (tmp_path / "b.json").write_text("[" + ",".join(lines) + "]")
    holds(imported("vllm", tmp_path / "b.json", tmp_path), requests)


def test_plain_nested_lists(tmp_path):
    requests = [ids(6), ids(6, seed=3)]
    (tmp_path / "a.json").write_text(json.dumps(requests[0].tolist()))
    holds(imported("vllm", tmp_path / "a.json", tmp_path), requests[:1])
    (tmp_path / "b.json").write_text(json.dumps([array.tolist() for array in requests]))
    holds(imported("vllm", tmp_path / "b.json", tmp_path), requests)


def sglang_response(array, prompt, completion, place="meta_info"):
    text = base64.b64encode(array.astype(np.int32).tobytes()).decode()
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    if place == "meta_info":
        return {"text": "", "meta_info": counts | {"id": "x", "routed_experts": text}}
    return {"choices": [{"text": ""}], "usage": counts, "sglext": {"routed_experts": text}}


@pytest.mark.parametrize("place", ["meta_info", "sglext"])
def test_sglang_bytes_take_their_shape_from_the_model(tmp_path, place):
    array = ids(9)
    (tmp_path / "a.json").write_text(json.dumps(sglang_response(array, 6, 4, place)))
    run = imported("sglang", tmp_path / "a.json", tmp_path, model=config(tmp_path))
    holds(run, [array])
    assert run.tokens(0, "generate")["position"].tolist() == list(range(9))
    with pytest.raises(DumpError, match="--model"):
        import_dump("sglang", tmp_path / "a.json", tmp_path / "runs")


def test_sglang_answers_that_leave_out_the_start(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(sglang_response(ids(5), 6, 4)))
    run = imported("sglang", tmp_path / "a.json", tmp_path, model=config(tmp_path))
    assert run.tokens(0, "generate")["position"].tolist() == [4, 5, 6, 7, 8]


def test_zeros_of_dense_layers_and_missed_tokens_are_not_expert_0(tmp_path):
    array = ids(6)
    array[:, 0] = 0  # a dense layer: its buffer was never written
    array[2, 1:] = 0  # a token that was not captured
    np.save(tmp_path / "a.npy", array)
    run = imported("vllm", tmp_path / "a.npy", tmp_path)
    assert [layer["index"] for layer in run.moe_layers] == [1, 2]
    assert run.decisions(0, 1, "generate")["token"].tolist() == [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(decisions(run, 0, 1), np.delete(array[:, 1], 2, axis=0))
    messages = "\n".join(run.events()["message"])
    assert "no assignment in layers 0" in messages
    assert "not captured" in messages


def test_a_dump_of_moe_layers_only_gets_their_indices(tmp_path):
    array = ids(6)
    np.save(tmp_path / "a.npy", array)
    model = config(tmp_path, num_hidden_layers=6, decoder_sparse_step=2)
    run = imported("vllm", tmp_path / "a.npy", tmp_path, model=model)
    assert [layer["index"] for layer in run.moe_layers] == [1, 3, 5]
    np.testing.assert_array_equal(decisions(run, 0, 3), array[:, 1])


def test_e_by_the_highest_id_is_said(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[[0, 4]]]))
    run = imported("vllm", tmp_path / "a.npy", tmp_path)
    assert run.moe_layers[0]["num_experts"] == 5
    assert any("5 by the highest id" in message for message in run.events()["message"])


def header(shape, descr="<i4", order=False, version=(1, 0)):
    buffer = io.BytesIO()
    content = {"shape": shape, "fortran_order": order, "descr": descr}
    np.lib.format.write_array_header_1_0(buffer, content)
    return buffer.getvalue()


GOOD = ids(2).tobytes()
NPY = {
    "huge": (header((10**12, L, K)) + GOOD, "declares"),
    "more than declared": (header((1, L, K)) + GOOD, "declares"),
    "cut": ((header((2, L, K)) + GOOD)[:-1], "declares"),
    "cut in the header": (header((2, L, K))[:20], "cut off"),
    "objects": (header((2, L, K), "|O") + GOOD, "dtype '|O'"),
    "floats": (header((2, L, K), "<f4") + GOOD, "dtype '<f4'"),
    "a record": (header((2,), [("a", "<i4")]) + GOOD, "expected whole numbers"),
    "two axes": (header((6, 2)) + GOOD, "expected .tokens, layers, top_k."),
    "no layers": (header((2, 0, 2)), "expected .tokens, layers, top_k."),
    "Fortran": (header((2, L, K), order=True) + GOOD, "Fortran"),
    "not an array": (b"hello world, this is text", "no .npy array"),
    "a pickle": (b"\x80\x04K\x01.", "no .npy array"),
    "below -1": (header((1, 1, 2)) + np.array([-5, 3], np.int32).tobytes(), "expert id -5"),
    "twice": (header((1, 1, 2)) + np.array([3, 3], np.int32).tobytes(), "takes an expert twice"),
    "no token": (header((0, L, K)), "holds no assignment"),
}


def refused(kind, file, tmp_path, expected, **options):
    with pytest.raises(DumpError, match=expected) as caught:
        import_dump(kind, file, tmp_path / "runs", **options)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(("data", "expected"), NPY.values(), ids=NPY)
def test_other_npy_files_are_refused(tmp_path, data, expected):
    (tmp_path / "a.npy").write_bytes(data)
    refused("vllm", tmp_path / "a.npy", tmp_path, expected)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([ids(2), ids(2, layers=2)], "arr_1 has 2 layers and top_k 2, the first has 3 and 2"),
        ([ids(2), ids(2)[:, :, :1]], "arr_1 has 3 layers and top_k 1, the first has 3 and 2"),
        ([ids(2), ids(2) * 1.0], "arr_1: has dtype"),
        ([], "holds no array"),
    ],
)
def test_requests_that_do_not_go_together_are_refused(tmp_path, requests, expected):
    np.savez(tmp_path / "a.npz", *requests)
    refused("vllm", tmp_path / "a.npz", tmp_path, expected)


def test_damaged_zips_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", ids(3000))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    (tmp_path / "cut.npz").write_bytes(data[: len(data) // 2])
    refused("vllm", tmp_path / "cut.npz", tmp_path, "cut off")
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "flipped.npz").write_bytes(data)
    refused("vllm", tmp_path / "flipped.npz", tmp_path, "cannot be unpacked|takes an expert twice|expert id")
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("readme.txt", "hello, this is no array")
    refused("vllm", tmp_path / "text.npz", tmp_path, "no .npy array")


JSON = {
    "broken line": ("vllm", "a.jsonl", '{"choices": [{"routed_experts": [[[1, 2]]]}]}\n{"cho', "line 2 is not JSON"),
    "a number": ("vllm", "a.json", "3", "is a int"),
    "not utf-8": ("vllm", "a.json", b"\xff\xfe\x00", "not JSON"),
    "deep": ("vllm", "a.json", "[" * 100_000, "not JSON"),
    "no routing": ("vllm", "a.json", '{"choices": [{"text": "x"}]}', "expected choices with routed_experts"),
    "null": ("vllm", "a.json", '{"choices": [{"routed_experts": null}]}', "null"),
    "uneven": ("vllm", "a.json", '{"choices": [{"routed_experts": [[[1, 2], [3]]]}]}', "uneven"),
    "floats": ("vllm", "a.json", '{"choices": [{"routed_experts": [[[1.5, 2]]]}]}', "float64"),
    "too big": ("vllm", "a.json", '{"choices": [{"routed_experts": [[[99999999999999999999999, 2]]]}]}', "object"),
    "beyond 32 bits": ("vllm", "a.json", '{"choices": [{"routed_experts": [[[4294967296, 2]]]}]}', "expert id 42949"),
    "not base64": ("vllm", "a.json", '{"choices": [{"routed_experts": "%%%"}]}', "not base64"),
    "no npy": ("vllm", "a.json", '{"choices": [{"routed_experts": "aGVsbG8="}]}', "no .npy array"),
    "vLLM's as SGLang's": ("sglang", "a.json", '{"choices": [{"routed_experts": [[[1, 2]]]}]}', "meta_info or sglext"),
    "empty list": ("vllm", "a.json", "[]", "holds no assignment"),
    "wrong ending": ("vllm", "a.pt", "x", r"ends in \.npy, \.npz"),
}


@pytest.mark.parametrize(("kind", "name", "text", "expected"), JSON.values(), ids=JSON)
def test_other_json_is_refused(tmp_path, kind, name, text, expected):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(kind, tmp_path / name, tmp_path, expected)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (sglang_response(ids(5)[:, :2], 3, 3), "expected int32 of 3 layers and top_k 2"),
        (sglang_response(ids(9), 3, 3), "9 tokens routed and says it has 6"),
        ({"meta_info": {"routed_experts": None}}, "not null"),
        (sglang_response(ids(5) + 8, 3, 3), "expert id 15|takes an expert|has expert id"),
    ],
)
def test_other_sglang_answers_are_refused(tmp_path, response, expected):
    (tmp_path / "a.json").write_text(json.dumps(response))
    refused("sglang", tmp_path / "a.json", tmp_path, expected, model=config(tmp_path))


def test_a_token_with_too_few_experts_is_refused(tmp_path):
    ids = np.zeros((5, 2, 2), np.int32)
    ids[..., 1] = 3
    ids[0] = -1  # the whole token: it was in the cache
    ids[4, 1] = [2, -1]
    np.save(tmp_path / "dump.npy", ids)
    with pytest.raises(DumpError, match=r"experts \[2, -1\] for token 4 in layer 1, expected as many experts as top_k"):
        import_dump("vllm", tmp_path / "dump.npy", tmp_path / "run")
