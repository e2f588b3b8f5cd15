"""Shapes and training schedules of the pairs that can be trained; the only place with numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import UsageError

FULL_ATTENTION_INTERVAL = 4
CONV_WIDTH = 4
ROTARY_FRACTION = 0.25
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class PairPreset:
    """Target shape, drafter shape and training schedule.

    Attributes named `gdn_*` are those of the Gated DeltaNet layers; `draft_*` those of the drafter.
    Batches are in tokens or sequences, lengths in tokens.
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    draft_layers: int
    draft_heads: int
    draft_kv_heads: int
    draft_head_dim: int
    draft_width: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    # Target training.
    target_steps: int = 6000
    batch_tokens: int = 65_536
    sequence: int = 512
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    weight_decay: float = 0.01
    balance_weight: float = 0.01
    decay_fraction: float = 0.6
    mix_exponent: float = 0.5
    # On-policy text.
    generated_sequences: int = 32_768
    generate_batch: int = 4096
    prompt_tokens: int = 64
    generate_tokens: int = 320
    sampled_fraction: float = 0.25
    # Drafter training.
    drafter_steps: int = 8000
    draft_batch: int = 256
    anchors: int = 16
    draft_muon_lr: float = 0.02
    draft_adam_lr: float = 0.004
    corpus_fraction: float = 0.1
    position_gamma: float = 7.0
    at_risk_weight: float = 0.5
    distill_weight: float = 0.2

    def __post_init__(self) -> None:
        positive = [f.name for f in dataclasses.fields(self) if f.type == "int"]
        rules = [
            (all(getattr(self, name) >= 1 for name in positive), "every integer must be >= 1"),
            (self.layers % FULL_ATTENTION_INTERVAL == 0, "layers must be a multiple of 4"),
            (self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads"),
            (self.draft_heads % self.draft_kv_heads == 0, "draft_heads: multiple of kv heads"),
            (self.gdn_value_heads % self.gdn_key_heads == 0, "gdn value heads: multiple of keys"),
            (self.head_dim % 16 == 0, "head_dim must be a multiple of 16"),
            (self.experts_per_token <= self.experts, "experts_per_token must be <= experts"),
            (
                bool(self.target_layer_ids)
                and list(self.target_layer_ids) == sorted(set(self.target_layer_ids))
                and self.target_layer_ids[0] >= 0
                and self.target_layer_ids[-1] <= self.layers - 2,
                "target_layer_ids must rise and be <= layers - 2",
            ),
            (
                self.generate_tokens > BLOCK_SIZE
                and self.prompt_tokens + self.generate_tokens <= MAX_POSITIONS,
                f"generate_tokens must be > {BLOCK_SIZE} and fit in {MAX_POSITIONS} positions",
            ),
        ]
        for holds, rule in rules:
            if not holds:
                raise UsageError(f"preset {self.name!r}: {rule}: change the preset or --set")

    def is_full_attention(self, layer: int) -> bool:
        """Tells whether a layer is full attention (every fourth) or Gated DeltaNet."""
        return (layer + 1) % FULL_ATTENTION_INTERVAL == 0

    def override(self, assignments: list[str]) -> PairPreset:
        """Returns the preset with `field=value` overrides; lists are comma-separated."""
        changes: dict[str, object] = {}
        types = {f.name: str(f.type) for f in dataclasses.fields(self)}
        for assignment in assignments:
            key, _, value = assignment.partition("=")
            try:
                kind = types[key]
                if kind.startswith("tuple"):
                    changes[key] = tuple(int(v) for v in value.split(","))
                else:
                    changes[key] = {"int": int, "float": float, "str": str}[kind](value)
            except (KeyError, ValueError) as error:
                raise UsageError(
                    f"--set {assignment!r} is not a preset field with a value of its type: "
                    f"use one of {', '.join(types)}"
                ) from error
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


# Deep and narrow: on a CPU plain decoding then costs several drafts, as it does on a GPU at full
# size, and verified rows still cost real time.
_DEMO = PairPreset(
    name="demo", vocab=512, hidden=96, layers=16, heads=2, kv_heads=1, head_dim=64,
    gdn_key_heads=1, gdn_value_heads=2, gdn_key_dim=64, gdn_value_dim=64,
    experts=64, experts_per_token=8, expert_width=8, shared_width=32,
    draft_layers=2, draft_heads=2, draft_kv_heads=1, draft_head_dim=64, draft_width=256,
    target_layer_ids=(1, 5, 9, 14),
    target_steps=2500, generated_sequences=16_384, drafter_steps=8_000,
)  # fmt: skip
_LAB = PairPreset(
    name="lab", vocab=4096, hidden=256, layers=8, heads=2, kv_heads=1, head_dim=256,
    gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=128, gdn_value_dim=128,
    experts=256, experts_per_token=8, expert_width=12, shared_width=256,
    draft_layers=3, draft_heads=4, draft_kv_heads=1, draft_head_dim=128, draft_width=512,
    target_layer_ids=(1, 3, 5, 6), target_steps=3000, drafter_steps=5000,
    generated_sequences=16_384, generate_batch=2048,
)  # fmt: skip
_MICRO_TEST = PairPreset(
    name="micro-test", vocab=384, hidden=32, layers=4, heads=2, kv_heads=1, head_dim=16,
    gdn_key_heads=1, gdn_value_heads=2, gdn_key_dim=16, gdn_value_dim=16,
    experts=8, experts_per_token=2, expert_width=12, shared_width=16,
    draft_layers=1, draft_heads=2, draft_kv_heads=1, draft_head_dim=16, draft_width=32,
    target_layer_ids=(0, 1, 2), target_steps=20, batch_tokens=512, sequence=64,
    generated_sequences=16, generate_batch=8, prompt_tokens=16, generate_tokens=40,
    drafter_steps=10, draft_batch=4, anchors=2,
)  # fmt: skip

PRESETS: dict[str, PairPreset] = {p.name: p for p in (_DEMO, _LAB, _MICRO_TEST)}


def get_preset(name: str, overrides: list[str] | None = None) -> PairPreset:
    """Returns a preset by name with `field=value` overrides applied."""
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} does not exist: use one of {', '.join(PRESETS)}")
    return PRESETS[name].override(overrides or [])
