"""A padded pair computes what its source computes, in the reference engine and in transformers."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parent))

from padded_kit import SHAPES, engine_of, open_pair, sizes_of, tokens_of, write_source

from hybridspec.demo import inflate
from hybridspec.demo.drafter_module import Drafter
from hybridspec.demo.export import save_drafter, save_target
from hybridspec.demo.padded_check import (
    ROUTE_TIE,
    Agreement,
    compare_decoded,
    compare_forward,
    decode,
    distinct_experts,
    forward,
)
from hybridspec.demo.padded_shape import PaddedShape
from hybridspec.demo.presets import PairPreset
from hybridspec.demo.target_module import Target
from hybridspec.demo.tokenization import TokenIds, save_tokenizer

PROMPTS = [(40, 1), (75, 2)]
# fp32: nothing but the order of summation differs. fp64 shows it: the constant dimension's share of
# the norms is what is left.
ATOL = {torch.float32: 1e-4, torch.float64: 1e-8}
SHARED_PAIRS = Path(__file__).resolve().parents[2].parent / "shared" / "pairs"


@pytest.fixture(scope="module", params=list(SHAPES))
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, PaddedShape]:
    """Source, padded pair and its shape, written by the command."""
    source_shape, shape = SHAPES[request.param]
    root = tmp_path_factory.mktemp("padded")
    source = write_source(root / "source", source_shape)
    out = root / "out"
    command = [str(source), "--out", str(out), "--dtype", "float32", "--shard-gb", "0.004"]
    assert inflate.run([*command, *sizes_of(shape)]) == 0
    return source, out, shape


def check(source: Path, padded: Path, shape: PaddedShape, dtype: torch.dtype) -> Agreement:
    small, large = engine_of(source, dtype), engine_of(padded, dtype)
    pair, agreement = open_pair(source, shape), Agreement()
    vocab = pair.target.vocab_size
    for count, seed in PROMPTS:
        prompt = tokens_of(vocab, count, seed)
        compare_forward(forward(small, prompt), forward(large, prompt), pair.padding, agreement)
        for drafts in (False, True):
            ours, theirs = (decode(e, prompt, 12, drafts=drafts) for e in (large, small))
            compare_decoded(theirs, ours, vocab, agreement)
    return agreement


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_routes_text_and_drafts_are_the_sources(
    folders: tuple[Path, Path, PaddedShape], dtype: torch.dtype
) -> None:
    found = check(*folders, dtype)
    assert found.logit_scale > 1.0
    assert found.tied_prompts < len(PROMPTS)
    assert found.logit_difference < ATOL[dtype]
    assert found.routes >= 4 * 115
    assert found.route_tie_margin < ROUTE_TIE
    assert found.tokens == 2 * 2 * 12
    assert found.token_differences == 0
    assert found.drafts >= 2 * 15
    assert found.draft_differences == 0
    assert found.draft_probability_difference < 1e-5
    assert found.draft_entropy_difference < 1e-4
    assert found.pass_through_changes == 0
    assert found.padded_mass < 1e-4
    assert found.draft_padded_mass < 1e-4
    # -2^18 over the root mean square of the stream; -inf where no vocabulary is added.
    assert found.padded_margin < -5000.0


def test_bf16_rows_of_the_padded_vocabulary_lose_as_well(tmp_path: Path) -> None:
    source_shape, shape = SHAPES["small"]
    source, out = write_source(tmp_path / "source", source_shape), tmp_path / "out"
    command = [str(source), "--out", str(out), "--dtype", "float32", *sizes_of(shape)]
    assert inflate.run(command) == 0
    found = check(source, out, shape, torch.bfloat16)
    assert found.padded_mass < 1e-4
    assert found.draft_padded_mass < 1e-4
    assert found.pass_through_changes == 0


def test_text_of_any_token_is_the_sources_where_tokens_are_padding(
    folders: tuple[Path, Path, PaddedShape],
) -> None:
    source, padded, shape = folders
    vocab = open_pair(source, shape).target.vocab_size
    if shape.vocab == vocab:
        pytest.skip("no vocabulary is added")
    logits = forward(engine_of(padded), [shape.vocab - 1, vocab, 3]).logits_TV
    assert logits.isfinite().all()
    assert int(logits.argmax(-1).max()) < vocab


def test_transformers_agrees(folders: tuple[Path, Path, PaddedShape]) -> None:
    import transformers

    source, padded, shape = folders
    pair = open_pair(source, shape)
    models = []
    for folder in (source, padded):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "target",
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        model, report = loaded
        assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
            report
        )
        models.append(model.eval())
    ids = torch.tensor([tokens_of(pair.target.vocab_size, 60, 5)])
    with torch.inference_mode():
        small, large = (m(input_ids=ids, output_router_logits=True) for m in models)
        texts = [m.generate(input_ids=ids, max_new_tokens=10, do_sample=False) for m in models]
    vocab = small.logits.shape[-1]
    torch.testing.assert_close(large.logits[..., :vocab], small.logits, atol=1e-4, rtol=0.0)
    assert float(large.logits.softmax(-1)[..., vocab:].sum(-1).max()) < 1e-4
    assert torch.equal(texts[0], texts[1])
    for j, layer in enumerate(pair.padding.live_layers):
        torch.testing.assert_close(
            large.router_logits[layer], small.router_logits[j], atol=1e-4, rtol=0.0
        )


def test_added_layers_load_experts_as_live_ones_do(
    folders: tuple[Path, Path, PaddedShape],
) -> None:
    source, padded, shape = folders
    engine, pair = engine_of(padded), open_pair(source, shape)
    records = []
    for seed in range(4):
        prompt = tokens_of(pair.target.vocab_size, 30, seed)
        records += decode(engine, prompt, 12, drafts=True).records
    counts_RYL = distinct_experts(
        records, layers=shape.layers, top_k=shape.experts_per_token, experts=shape.experts
    )
    live = list(pair.padding.live_layers)
    added = [i for i in range(shape.layers) if i not in live]
    means_YL = counts_RYL.mean(0)
    assert (counts_RYL[:, :, 0] == shape.experts_per_token).all()
    for length in (4, 8, 16):
        ratio = means_YL[added, length - 1].mean() / means_YL[live, length - 1].mean()
        assert 0.7 < ratio < 1.4, (length, ratio)
    routes = [forward(engine, tokens_of(203, 40, 9)).routes[i] for i in added]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(routes))
    weights, width = pair.target_weights(), pair.target.hidden_size
    for i in added:
        kept = live[pair.padding.router_layers[i]]
        ours, theirs = (
            weights.recipes[f"model.language_model.layers.{n}.mlp.gate.weight"].make()[:, :width]
            for n in (i, kept)
        )
        assert not torch.equal(ours, theirs)
        assert sorted(ours.tolist()) == sorted(theirs.tolist())


def test_a_pair_of_the_trainer_in_bf16_stays_exact(
    target: Target, preset: PairPreset, tokenizer: Any, tmp_path: Path
) -> None:
    ids = TokenIds.of(tokenizer)
    drafter = Drafter(preset)
    drafter.initialise(2)
    save_target(target, tmp_path / "source" / "target", ids)
    save_drafter(drafter, tmp_path / "source" / "drafter", ids)
    save_tokenizer(tokenizer, tmp_path / "source" / "target")
    shape = PaddedShape(
        layers=8, hidden=256, vocab=500, heads=4, kv_heads=2, head_dim=16,
        gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=16, gdn_value_dim=16,
        experts=8, experts_per_token=2, expert_width=32, shared_width=32,
        draft_layers=2, draft_heads=4, draft_kv_heads=2, draft_head_dim=16, draft_width=64,
        draft_target_layers=4, max_positions=4096,
    )  # fmt: skip
    out = tmp_path / "out"
    assert inflate.run([str(tmp_path / "source"), "--out", str(out), *sizes_of(shape)]) == 0
    found = check(tmp_path / "source", out, shape, torch.float64)
    assert found.logit_difference < ATOL[torch.float64]
    assert found.draft_differences == found.token_differences == found.route_differences == 0
    with safe_open(out / "target" / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    wide = {name for name, kind in kinds.items() if kind == "F32"}
    assert wide == {n for n in kinds if n.endswith(("A_log", "linear_attn.norm.weight"))}
    assert (out / "target" / "tokenizer.json").is_file()
    config = json.loads((out / "target" / "config.json").read_text())
    assert "hybridspec_preset" not in config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["micro", "small"])
def test_trained_pairs(name: str, tmp_path: Path) -> None:
    source = SHARED_PAIRS / name
    if not source.is_dir():
        pytest.skip(f"the trained pair {name} is not beside the repository")
    text = json.loads((source / "target" / "config.json").read_text())["text_config"]
    draft = json.loads((source / "drafter" / "config.json").read_text())
    shape = PaddedShape(
        layers=16, hidden=4 * text["hidden_size"], vocab=5000,
        heads=8, kv_heads=2, head_dim=text["head_dim"],
        gdn_key_heads=4, gdn_value_heads=8, gdn_key_dim=text["linear_key_head_dim"],
        gdn_value_dim=text["linear_value_head_dim"], experts=text["num_experts"],
        experts_per_token=text["num_experts_per_tok"], expert_width=40, shared_width=256,
        draft_layers=4, draft_heads=8, draft_kv_heads=2, draft_head_dim=draft["head_dim"],
        draft_width=512, max_positions=4096,
    )  # fmt: skip
    out = tmp_path / "out"
    assert inflate.run([str(source), "--out", str(out), *sizes_of(shape)]) == 0
    small, large, agreement = engine_of(source), engine_of(out), Agreement()
    pair = open_pair(source, shape)
    rows = json.loads((source / "prompts.json").read_text())
    for row in [r for r in rows if r["split"] == "test"][::40]:
        prompt = row["ids"]
        compare_forward(forward(small, prompt), forward(large, prompt), pair.padding, agreement)
        ours, theirs = (decode(e, prompt, 24, drafts=True) for e in (large, small))
        compare_decoded(theirs, ours, pair.target.vocab_size, agreement)
    assert agreement.tied_prompts < 2
    assert agreement.logit_difference < 2e-4
    assert agreement.token_differences == agreement.draft_differences == 0
    assert agreement.route_tie_margin < ROUTE_TIE
    assert max(agreement.padded_mass, agreement.draft_padded_mass) < 1e-4
    assert agreement.pass_through_changes == 0
