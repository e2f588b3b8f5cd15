"""Every folder that is no such pair is refused with one line: value, rule, remedy."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import random_tokens, teacher_forced
from folder_kit import edit_config, edit_weights, shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridspec.errors import ModelError
from hybridspec.reference.config import load_drafter_config, load_target_config
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import (
    PairShape,
    drafter_config,
    target_config,
)

ROOT = "model.language_model."


def load(pair: tuple[Path, Path]) -> None:
    load_pair(*pair, max_context=64)


def refused(call: Callable[[], object], *words: str) -> str:
    """The refusal's one line, which must hold all words."""
    with pytest.raises(ModelError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert caught.value.exit_code == 3
    return message


# ---------------------------------------------------------------------------- folders and files


@pytest.mark.parametrize("side", [0, 1])
def test_folder_or_file_that_is_missing(pair: tuple[Path, Path], side: int) -> None:
    folder = pair[side]
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    refused(lambda: load(pair), str(folder), "*.safetensors")
    weights.write_bytes(content)
    (folder / "config.json").unlink()
    refused(lambda: load(pair), str(folder), "config.json")
    shutil.rmtree(folder)
    refused(lambda: load(pair), str(folder), "not a folder")


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"null", b"{}"])
def test_config_that_is_no_object(pair: tuple[Path, Path], side: int, content: bytes) -> None:
    (pair[side] / "config.json").write_bytes(content)
    refused(lambda: load(pair), "config.json")


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights(pair: tuple[Path, Path], side: int, keep: float) -> None:
    path = pair[side] / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    refused(lambda: load(pair), "model.safetensors", "truncated", "download it again")


def test_shards_equal_a_single_file_and_each_is_needed(pair: tuple[Path, Path]) -> None:
    tokens = random_tokens(320, 40, seed=1)
    whole = teacher_forced(load_pair(*pair, max_context=64), tokens, [0]).logits
    for folder in pair:
        shard(folder, 3)
    assert torch.equal(teacher_forced(load_pair(*pair, max_context=64), tokens, [0]).logits, whole)
    (pair[0] / "model-00002-of-00003.safetensors").unlink()
    refused(lambda: load(pair), "model-00002-of-00003.safetensors", "missing")


@pytest.mark.parametrize(
    "index",
    ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../model.safetensors"}}',
     '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "/etc/passwd"}}'],
)  # fmt: skip
def test_index_that_cannot_be_followed(pair: tuple[Path, Path], index: str) -> None:
    (pair[0] / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    refused(lambda: load(pair))


def test_index_whose_shard_lacks_the_tensor(pair: tuple[Path, Path]) -> None:
    shard(pair[0], 2)
    path = pair[0] / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    files = sorted(set(index["weight_map"].values()))
    name = ROOT + "norm.weight"
    index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])
    path.write_text(json.dumps(index), encoding="utf-8")
    refused(lambda: load(pair), name, "does not hold")


# ---------------------------------------------------------------------------- tensors

TENSORS = [
    (0, ROOT + "embed_tokens.weight"),
    (0, ROOT + "layers.0.linear_attn.A_log"),
    (0, ROOT + "layers.2.mlp.experts.down_proj"),
    (0, ROOT + "layers.3.self_attn.q_norm.weight"),
    (1, "fc.weight"),
    (1, "layers.0.self_attn.k_proj.weight"),
]


@pytest.mark.parametrize(("side", "name"), TENSORS)
def test_tensor_that_is_missing_or_wrong(pair: tuple[Path, Path], side: int, name: str) -> None:
    folder = pair[side]
    original = load_file(folder / "model.safetensors")[name]

    def put(value: torch.Tensor | None) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

        edit_weights(folder, change)

    put(None)
    refused(lambda: load(pair), str(folder), name, "lacks")
    put(torch.cat([original, original]))
    refused(lambda: load(pair), name, str(tuple(original.shape)))
    put(original.unsqueeze(0))
    refused(lambda: load(pair), name, "shape")
    for bad in (float("nan"), float("inf")):
        broken = original.clone()
        broken.view(-1)[-1] = bad
        put(broken)
        refused(lambda: load(pair), name, "NaN or infinite")
    put(original.to(torch.int8))
    refused(lambda: load(pair), name, "int8")
    put(original.to(torch.bfloat16))
    load(pair)


def test_lm_head_is_needed_unless_tied(pair: tuple[Path, Path]) -> None:
    edit_config(pair[0], lambda c: c.update(tie_word_embeddings=False))
    refused(lambda: load(pair), "lm_head.weight")


# ---------------------------------------------------------------------------- configurations

TARGET_FIELDS: list[tuple[str, Any, str]] = [
    ("num_hidden_layers", None, "num_hidden_layers"),
    ("hidden_size", 0, "hidden_size = 0"),
    ("vocab_size", -5, "vocab_size = -5"),
    ("vocab_size", "many", "'many'"),
    ("num_experts_per_tok", 9, "top-9 of 8"),
    ("hidden_act", "gelu", "'gelu'"),
    ("attention_bias", True, "attention_bias"),
    ("layer_types", ["linear_attention"] * 3, "3 layer_types"),
    ("layer_types", ["linear_attention", "sliding", "full_attention", "mamba"], "mamba"),
    ("layer_types", ["full_attention"] + ["linear_attention"] * 3, "first-router stop"),
    ("mlp_only_layers", [1], "routed experts"),
    ("decoder_sparse_step", 2, "routed experts"),
    ("num_key_value_heads", 3, "3 groups"),
    ("linear_num_value_heads", 3, "shape"),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "'yarn'"),
    ("rope_parameters", {"rope_type": "default"}, "rope_theta"),
    ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.17}, "even"),
    ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 2.0}, "64 of 32"),
]


@pytest.mark.parametrize(("field", "value", "word"), TARGET_FIELDS)
def test_target_config_that_cannot_be_right(
    pair: tuple[Path, Path], field: str, value: Any, word: str
) -> None:
    edit_config(pair[0], lambda c: c["text_config"].update({field: value}))
    refused(lambda: load(pair), word)


@pytest.mark.parametrize("names", [None, [], ["LlamaForCausalLM"], "Qwen3NextForCausalLM", 7])
def test_other_architectures(pair: tuple[Path, Path], names: Any) -> None:
    edit_config(pair[0], lambda c: c.update(architectures=names))
    refused(lambda: load(pair), "architectures", "Qwen3_5MoeForConditionalGeneration")


def test_folders_given_the_wrong_way_round(pair: tuple[Path, Path]) -> None:
    refused(lambda: load((pair[1], pair[0])), "DFlashDraftModel")
    refused(lambda: load((pair[0], pair[0])), "DFlashDraftModel")


DRAFTER_FIELDS: list[tuple[str, Any, str]] = [
    ("hidden_size", 128, "another target: its hidden_size is 128, this target has 64"),
    ("vocab_size", 321, "another target: its vocab_size is 321, this target has 320"),
    ("num_target_layers", 5, "another target: its num_target_layers is 5, this target has 4"),
    ("target_layer_ids", [0, 4], "layers [4]"),
    ("target_layer_ids", [-1, 2], "layers [-1]"),
    ("target_layer_ids", [2, 0], "rising"),
    ("target_layer_ids", [1, 1], "rising"),
    ("target_layer_ids", [], "target_layer_ids"),
    ("target_layer_ids", 3, "target_layer_ids"),
    ("target_layer_ids", [0, 1, 2], "fc.weight"),
    ("mask_token_id", 320, "mask token 320"),
    ("mask_token_id", None, "mask_token_id"),
    ("block_size", 8, "block_size 8"),
    ("layer_types", ["sliding_attention"], "sliding_attention"),
    ("num_hidden_layers", 2, "layers.1."),
    ("head_dim", 31, "must be even"),
    ("rope_theta", None, "rope_theta"),
    ("architectures", ["Qwen3ForCausalLM"], "DFlashDraftModel"),
]


@pytest.mark.parametrize(("field", "value", "word"), DRAFTER_FIELDS)
def test_drafter_of_another_target(
    pair: tuple[Path, Path], field: str, value: Any, word: str
) -> None:
    def change(config: dict[str, Any]) -> None:
        inner = config["dflash_config"]
        (inner if field in inner else config)[field] = value

    edit_config(pair[1], change)
    refused(lambda: load(pair), word)


def places(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield (*path, key)
            yield from places(value, (*path, key))


TARGET, DRAFTER = target_config(PairShape()), drafter_config(PairShape())
JUNK: list[Any] = [
    None, -1, 0, 1, "x", "", [], {}, [1], [None], {"a": 1}, True, 3.7, 10**30, 1e400, "<delete>",
]  # fmt: skip


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.tuples(st.just(True), st.sampled_from(list(places(TARGET))), st.sampled_from(JUNK)),
        st.tuples(st.just(False), st.sampled_from(list(places(DRAFTER))), st.sampled_from(JUNK)),
    )
)
def test_any_junk_in_a_config_is_refused_or_harmless(
    tmp_path: Path, case: tuple[bool, tuple[str, ...], Any]
) -> None:
    is_target, path, value = case
    config = copy.deepcopy(TARGET if is_target else DRAFTER)
    inner: Any = config
    for key in path[:-1]:
        inner = inner[key]
    if value == "<delete>":
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        (load_target_config if is_target else load_drafter_config)(tmp_path)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both outcomes are right
