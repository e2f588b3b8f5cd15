"""The drafter against a plain float64 recomputation written from the model's definition.

DFlash: every layer's keys and values are those of the context (fused hidden states of the target)
followed by those of the block (anchor and 15 masks); block rows attend to all of them, both ways.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_kit import (
    SHAPES,
    TRAINED_PAIRS,
    decode,
    prompts_of,
    random_engine,
    random_tokens,
    spread,
    trained_pair,
)
from oracle_kit import load_oracle
from safetensors.torch import load_file
from state_kit import draft_context_of

from hybridspec.reference.drafter import DraftSignals
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.request import LengthRule

F64 = torch.float64


class NaiveDrafter:
    """No cache, no packed weights, no batch: one request from all its hidden states."""

    def __init__(self, target: Path, drafter: Path) -> None:
        self.config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
        self.weights = {n: w.to(F64) for n, w in _tensors(drafter).items()}
        shared = _tensors(target)
        self.embedding = shared["model.language_model.embed_tokens.weight"].to(F64)
        self.lm_head = shared.get("lm_head.weight", self.embedding).to(F64)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config["rms_norm_eps"]) * self.weights[name]

    def _rotate(self, x_THD: torch.Tensor, start: int) -> torch.Tensor:
        dim = x_THD.shape[-1]
        theta = float(self.config["rope_theta"])
        position = torch.arange(start, start + x_THD.shape[0], dtype=F64)
        angle = position[:, None] * theta ** (-torch.arange(0, dim, 2, dtype=F64) / dim)
        unit = torch.polar(torch.ones_like(angle), angle)[:, None]
        first, second = x_THD.chunk(2, -1)
        turned = torch.complex(first, second) * unit
        return torch.cat([turned.real, turned.imag], -1)

    def logits(self, features_TF: torch.Tensor, anchor: int) -> torch.Tensor:
        """[15, V] of the drafts behind `anchor`, whose position is T."""
        config, w = self.config, self.weights
        heads, groups, dim = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        context = self._norm(features_TF.to(F64) @ w["fc.weight"].T, "hidden_norm.weight")
        start = context.shape[0]
        mask = config["dflash_config"]["mask_token_id"]
        x = self.embedding[torch.tensor([anchor] + [mask] * 15)]
        for i in range(config["num_hidden_layers"]):
            layer, attention = f"layers.{i}.", f"layers.{i}.self_attn."
            inner = self._norm(x, layer + "input_layernorm.weight")
            q = (inner @ w[attention + "q_proj.weight"].T).view(16, heads, dim)
            q = self._rotate(self._norm(q, attention + "q_norm.weight"), start)
            source = torch.cat([context, inner])
            k = (source @ w[attention + "k_proj.weight"].T).view(-1, groups, dim)
            k = self._rotate(self._norm(k, attention + "k_norm.weight"), 0)
            v = (source @ w[attention + "v_proj.weight"].T).view(-1, groups, dim)
            k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(16, -1)
            x = x + mixed @ w[attention + "o_proj.weight"].T
            inner = self._norm(x, layer + "post_attention_layernorm.weight")
            gate = inner @ w[layer + "mlp.gate_proj.weight"].T
            up = inner @ w[layer + "mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj.weight"].T
        return self._norm(x, "norm.weight")[1:] @ self.lm_head.T


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: w for file in folder.glob("*.safetensors") for n, w in load_file(file).items()}


def assert_signals(have: DraftSignals, row: int, logits: torch.Tensor, *, atol: float) -> None:
    """Tokens equal but for ties; probabilities and entropy within `atol`."""
    p = logits.softmax(-1)
    top = p.topk(2, -1)
    assert have.tokens_BD.shape[1] == 15
    tied = top.values[:, 0] - top.values[:, 1] < atol
    equal = have.tokens_BD[row] == top.indices[:, 0]
    assert bool((equal | tied).all())
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    for mine, want in (
        (have.p1_BD, top.values[:, 0]),
        (have.p2_BD, top.values[:, 1]),
        (have.entropy_BD, entropy),
    ):
        torch.testing.assert_close(mine[row].to(F64), want, atol=atol, rtol=0.0)


def random_features(engine: Engine, tokens: int, seed: int) -> torch.Tensor:
    assert engine.drafter is not None
    config = engine.drafter.config
    width = len(config.target_layer_ids) * config.hidden_size
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", list(SHAPES))
def test_batch_of_different_contexts_equals_naive(name: str, pairs_folder: Path) -> None:
    shape = SHAPES[name]
    engine = random_engine(pairs_folder / name, shape)
    drafter = engine.drafter
    assert drafter is not None
    naive = NaiveDrafter(pairs_folder / name / "target", pairs_folder / name / "drafter")
    contexts, anchors = (1, 37, 239, 256), (3, 0, 7, 60)
    caches = [drafter.new_cache() for _ in contexts]
    features = [random_features(engine, n, seed=n) for n in contexts]
    with torch.inference_mode():
        for cache, rows in zip(caches, features, strict=True):
            drafter.inject(cache, 0, rows)
        signals = drafter.draft(anchors, contexts, caches)
        alone = drafter.draft(anchors[1:2], contexts[1:2], caches[1:2])
    for row in range(len(contexts)):
        assert_signals(signals, row, naive.logits(features[row], anchors[row]), atol=2e-5)
    assert_signals(alone, 0, naive.logits(features[1], anchors[1]), atol=2e-5)


def test_context_that_grows_over_pages_equals_naive(pairs_folder: Path) -> None:
    """Injected piece by piece, with drafts between that leave their own keys behind."""
    shape = SHAPES["grouped"]
    engine = random_engine(pairs_folder / "grouped", shape)
    drafter = engine.drafter
    assert drafter is not None
    naive = NaiveDrafter(pairs_folder / "grouped" / "target", pairs_folder / "grouped" / "drafter")
    features = random_features(engine, 560, seed=1)
    cache, done, capacities = drafter.new_cache(), 0, set()
    with torch.inference_mode():
        for step in (230, 9, 1, 16, 3, 120, 5, 128, 1, 16, 31):
            drafter.inject(cache, done, features[done : done + step])
            done += step
            signals = drafter.draft([done % 50], [done], [cache])
            assert_signals(signals, 0, naive.logits(features[:done], done % 50), atol=5e-5)
            capacities.add(cache.capacity)
    assert done == 560
    assert len(capacities) >= 3


@pytest.mark.parametrize("name", TRAINED_PAIRS)
def test_trained_drafter_equals_naive_on_the_oracles_hidden_states(name: str) -> None:
    """Hidden states from transformers, so the layers that the drafter reads are right as well."""
    folder = trained_pair(name)
    [prompt] = spread(prompts_of(folder), 1)
    engine = load_pair(folder / "target", folder / "drafter", max_context=512)
    model = load_oracle(folder / "target")
    found: list[torch.Tensor] = []
    layer_ids = json.loads((folder / "drafter" / "config.json").read_text(encoding="utf-8"))[
        "dflash_config"
    ]["target_layer_ids"]
    layers = model.model.language_model.layers
    hooks = [
        layers[i].register_forward_hook(
            lambda _module, _args, out: found.append(out[0] if out.dim() == 3 else out)
        )
        for i in layer_ids
    ]
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    features = torch.cat(found, -1)
    request = engine.add(prompt, length_rule=LengthRule("fixed"))
    [outcome] = engine.step([request], record=True)
    record = outcome.record
    assert record is not None
    assert record.context_tokens == len(prompt)
    signals = DraftSignals(
        torch.tensor([record.draft_tokens]),
        *(torch.tensor([x]) for x in (record.p1, record.p2, record.entropy_nats)),
    )
    naive = NaiveDrafter(folder / "target", folder / "drafter")
    assert_signals(signals, 0, naive.logits(features, record.anchor), atol=2e-4)


def test_drafts_do_not_depend_on_how_the_text_was_decoded(pairs_folder: Path) -> None:
    """Context keys after rounds of any length equal those of a prefill of the same tokens."""
    shape = SHAPES["grouped"]
    engine = random_engine(pairs_folder / "grouped", shape, dtype=F64)
    prompt = random_tokens(shape.vocab_size, 90, seed=8)
    [plain] = decode(engine, [prompt], LengthRule("none"), 40)
    drafted = engine.add(prompt, length_rule=LengthRule("fixed", 5))
    while drafted.num_emitted < 30:
        engine.step([drafted])
    assert drafted.tokens[90:] == plain[: drafted.num_emitted]
    fresh = engine.add(drafted.tokens[: drafted.context_tokens], length_rule=LengthRule("fixed"))
    torch.testing.assert_close(
        draft_context_of(engine, drafted), draft_context_of(engine, fresh), atol=1e-9, rtol=0.0
    )
    for request in (drafted, fresh):
        engine.remove(request)
