"""References and folders: what loads, without torch where none is needed, and what each broken file is told to be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tailspan
from models.errors import UserError
from models.known import KNOWN
from models.known_shapes import SHAPES
from models.pull import pull
from models.store import load, load_reference, resolve

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n"
PAGE = b"\n<!DOCTYPE html><html><body>404</body></html>"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_loads_whole(folder: Path) -> None:
    model = load(str(folder))
    assert model.name == "model" and model.folder == folder
    assert set(model.weights) == set(model.shape.tensor_shapes())
    for name, expected in model.shape.tensor_shapes().items():
        assert tuple(model.weights[name].shape) == expected
    assert model.weights.total_bytes == 4 * model.shape.parameters()
    assert set(model.shas) == {"model", "tokenizer", "template"}


def test_weights_are_mapped_not_copied(folder: Path) -> None:
    model = load(str(folder))
    name = "model.layers.0.mlp.up_proj.weight"
    assert model.weights[name].data_ptr() == model.weights[name].data_ptr()
    assert model.weights[name].data_ptr() == model.weights.stored(name).data_ptr()


def test_a_reference_needs_no_torch_and_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    code = (
        "import sys; from models.store import load_reference; r = load_reference(sys.argv[1]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules;"
        "print(len(r.tokenizer.encode('hello')), sorted(r.shas))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["['template',", "'tokenizer']"]


def test_half_precision_is_widened_and_kept_as_stored(folder: Path) -> None:
    import torch

    original = load_file(folder / "model.safetensors")
    save_file({name: weight.astype(np.float16) for name, weight in original.items()}, folder / "model.safetensors")
    weights = load(str(folder)).weights
    assert weights.stored("model.norm.weight").dtype == torch.float16
    assert weights["model.norm.weight"].dtype == torch.float32


def test_shards_are_joined(folder: Path) -> None:
    original = load_file(folder / "model.safetensors")
    before = load(str(folder))
    (folder / "model.safetensors").unlink()
    names = sorted(original)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, members in shards.items():
        save_file({name: original[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    after = load(str(folder))
    for name, weight in original.items():
        np.testing.assert_array_equal(after.weights[name].numpy(), weight)
    assert after.shas["model"] != before.shas["model"]
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match="no such file") as caught:
        load(str(folder))
    assert caught.value.where == str(folder / "b.safetensors")
    index["weight_map"][names[0]] = "../outside.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="outside the folder"):
        load(str(folder))


def test_the_digest_follows_the_weights(folder: Path) -> None:
    before = load_reference(str(folder)).shas["model"]
    assert load_reference(str(folder)).shas["model"] == before
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors")
    assert load_reference(str(folder)).shas["model"] != before


def test_end_tokens_are_gathered_and_templates_found(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_reference(str(folder)).shape.eos_token_ids == (2, 0)
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "named"}])
    assert load_reference(str(folder)).template.source == "named"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}own")
    edit(folder / "tokenizer_config.json", bos_token={"content": "<|im_start|>"})
    template = load_reference(str(folder)).template
    assert template.render([{"role": "user", "content": ""}]) == "<|im_start|>own"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert load_reference(str(folder)).template.source is None


@pytest.mark.parametrize("name", [*sorted(SHAPES.keys() - KNOWN.keys()), "Llama-3.1-8B"])
def test_a_model_whose_shape_alone_is_known_names_the_backend_that_has_it(name: str) -> None:
    for ask in (resolve, load_reference, load, pull):
        with pytest.raises(UserError, match="only --backend simulated has it") as caught:
            ask(name)
        assert repr(name) in caught.value.message and f"--model {name.lower()}" in str(caught.value.remedy)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_serving_such_a_model_says_so(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tailspan.main(["serve", "--model", "llama-3.1-8b", "--backend", backend, "--port", "0"]) == 4
    assert "only --backend simulated has it" in capsys.readouterr().err


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(UserError, match="smolm2") as caught:
        resolve("smolm2")
    assert "did you mean 'smollm2'?" in str(caught.value.remedy)


@pytest.mark.parametrize("content", [POINTER, PAGE, b"", b"PK\x03\x04not a model"])
def test_stand_ins_for_a_gguf_are_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"LFS pointer|HTML page|empty|not a GGUF") as caught:
        resolve(str(path))
    assert caught.value.where == str(path) and caught.value.remedy


def test_a_missing_gguf_and_a_folder_of_ggufs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        resolve(str(tmp_path / "none.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"no config\.json") as caught:
        resolve(str(tmp_path))
    assert "m.gguf" in str(caught.value.remedy)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [POINTER, PAGE, b"", b"{\n  'x': 1}", b"[]", b"\xff\xfe", b"\xff" * 9])
def test_broken_files_of_a_folder_are_named(file: str, content: bytes, folder: Path) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(str(folder))
    assert str(caught.value.where).startswith(str(folder / file)) and caught.value.remedy


def test_a_mistake_in_json_names_its_line(folder: Path) -> None:
    (folder / "config.json").write_text('{\n  "a": 1,\n  oops\n}')
    with pytest.raises(UserError) as caught:
        load_reference(str(folder))
    assert caught.value.where == f"{folder / 'config.json'}:3"


def test_missing_files_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="No such file"):
        load(str(folder))


def _drop(weights: dict[str, np.ndarray]) -> None:
    del weights["model.norm.weight"]


def _bias(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)


def _narrow(weights: dict[str, np.ndarray]) -> None:
    weights["model.norm.weight"] = np.zeros(63, np.float32)


def _integers(weights: dict[str, np.ndarray]) -> None:
    weights["model.norm.weight"] = np.zeros(64, np.int8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop, "norm.weight is missing"),
        (_bias, "q_proj.bias is not part"),
        (_narrow, r"shape \(63,\)"),
        (_integers, "type I8"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[dict[str, np.ndarray]], None], named: str, folder: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=named):
        load(str(folder))


def test_truncated_weights_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for kept in (4, 100, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(UserError, match="truncated"):
            load(str(folder))


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=300)
    with pytest.raises(UserError, match="512 tokens, the model 300"):
        load_reference(str(folder))


def test_a_tied_model_may_repeat_its_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    save_file(weights, folder / "model.safetensors")
    assert "lm_head.weight" not in load(str(folder)).weights
