"""What folders may leave out or name otherwise, and options of loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_kit import SHAPES, random_tokens, teacher_forced
from folder_kit import edit_config, edit_weights
from oracle_kit import assert_equal_to_oracle, load_oracle

from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.reference.config import load_target_config
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import write_random_pair

ROOT = "model.language_model."


def test_eos_of_the_generation_config_goes_first(pair: tuple[Path, Path]) -> None:
    edit_config(pair[0], lambda c: c["text_config"].update(eos_token_id=3))
    assert load_target_config(pair[0]).eos_token_ids == (3,)
    path = pair[0] / "generation_config.json"
    path.write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    assert load_target_config(pair[0]).eos_token_ids == (7, 9)


def test_rotary_share_that_is_not_given_is_a_quarter(pair: tuple[Path, Path]) -> None:
    edit_config(pair[0], lambda c: c["text_config"]["rope_parameters"].pop("partial_rotary_factor"))
    tokens = random_tokens(320, 40, seed=2)
    forced = teacher_forced(load_pair(pair[0], None, max_context=64), tokens, [0])
    assert_equal_to_oracle(load_oracle(pair[0]), tokens, forced)


def test_text_only_architecture(tmp_path: Path) -> None:
    """`Qwen3_5MoeForCausalLM`: flat config, names without the multimodal prefix."""
    shape = SHAPES["grouped"]
    target, _ = write_random_pair(tmp_path, shape, seed=3)
    tokens = random_tokens(shape.vocab_size, 40, seed=2)
    want = teacher_forced(load_pair(target, None, max_context=64), tokens, [0]).logits
    path = target / "config.json"
    text = json.loads(path.read_text(encoding="utf-8"))["text_config"]
    flat = {**text, "architectures": ["Qwen3_5MoeForCausalLM"]}
    path.write_text(json.dumps(flat), encoding="utf-8")
    edit_weights(
        target,
        lambda tensors: [
            tensors.update({name.replace(ROOT, "model."): tensors.pop(name)})
            for name in list(tensors)
        ],
    )
    have = teacher_forced(load_pair(target, None, max_context=64), tokens, [0])
    assert torch.equal(have.logits, want)
    assert_equal_to_oracle(load_oracle(target, "Qwen3_5MoeForCausalLM"), tokens, have)


def test_options_that_cannot_be_right(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="int8"):
        load_pair(*pair, dtype="int8")
    for max_context in (1, 0, 5000):
        with pytest.raises(UsageError, match=str(max_context)):
            load_pair(*pair, max_context=max_context)
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentMissing, match="cuda:0"):
            load_pair(*pair, device="cuda:0")
