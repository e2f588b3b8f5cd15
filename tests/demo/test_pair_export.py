from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from hybridspec.demo import assets
from hybridspec.demo.drafter_module import Drafter
from hybridspec.demo.export import (
    load_drafter,
    load_target,
    save_drafter,
    save_target,
    weight_bytes,
)
from hybridspec.demo.presets import PRESETS, PairPreset
from hybridspec.demo.target_module import Target
from hybridspec.demo.tokenization import TokenIds, save_tokenizer


def test_target_loads_in_transformers_with_equal_logits(
    target: Target, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    save_target(target, tmp_path, TokenIds.of(tokenizer))
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    ids = torch.randint(0, target.preset.vocab, (2, 75), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
        found = target.logits(target(ids).hidden)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_tokenizer_and_chat_template_load_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = loaded.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = loaded(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_saved_pair_reads_back_and_is_as_large_as_announced(
    target: Target, preset: PairPreset, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ids = TokenIds.of(tokenizer)
    drafter = Drafter(preset)
    drafter.initialise(2)
    save_target(target, tmp_path / "target", ids)
    save_drafter(drafter, tmp_path / "drafter", ids)
    again = load_target(tmp_path / "target", torch.device("cpu"))
    for name, value in target.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float()), name
    load_drafter(tmp_path / "drafter", torch.device("cpu"))
    sizes = []
    for part in ("target", "drafter"):
        with safe_open(tmp_path / part / "model.safetensors", "pt") as file:
            sizes.append(sum(file.get_tensor(name).nbytes for name in file.keys()))  # noqa: SIM118
    assert tuple(sizes) == weight_bytes(preset)


def test_drafter_has_the_names_that_dflash_loads(
    preset: PairPreset, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_drafter(Drafter(preset), tmp_path, TokenIds.of(tokenizer))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    layer = [f"self_attn.{n}_proj" for n in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    layer += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    assert names == {f"layers.0.{n}.weight" for n in layer} | {
        "norm.weight",
        "fc.weight",
        "hidden_norm.weight",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 16
    assert config["dflash_config"]["target_layer_ids"] == list(preset.target_layer_ids)
    assert config["dflash_config"]["mask_token_id"] == tokenizer.token_to_id("<|MASK|>")


def test_embedded_pair_is_small_enough_to_ship() -> None:
    assert sum(weight_bytes(PRESETS["demo"])) <= 7.5e6
    shipped = [path for path in assets.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in shipped) <= 8_000_000
