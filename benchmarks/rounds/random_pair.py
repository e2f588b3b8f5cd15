"""Random weights at the shape of Qwen3.6-35B-A3B and its DFlash drafter, made on the card."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hybridspec.demo.padded_shape import QWEN36_35B_A3B, PaddedShape
from hybridspec.reference.config import DrafterConfig, TargetConfig

STD = 0.02
# As small as the kernels take.
SMALL = PaddedShape(
    layers=4, hidden=512, vocab=2048, heads=4, kv_heads=2, head_dim=64, gdn_key_heads=2,
    gdn_value_heads=4, experts=32, expert_width=128, shared_width=128, draft_layers=2,
    draft_heads=4, draft_kv_heads=2, draft_head_dim=64, draft_width=256, draft_target_layers=2,
    max_positions=65_536,
)  # fmt: skip
FULL = QWEN36_35B_A3B


def target_config(shape: PaddedShape) -> TargetConfig:
    """Config of the target; the numbers that no shape holds are Qwen3.5's."""
    return TargetConfig(
        architecture="Qwen3_5MoeForConditionalGeneration",
        weight_prefix="model.language_model.",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        layer_is_attention=shape.layer_is_attention,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.head_dim // 4,
        rope_theta=1e7,
        conv_kernel=4,
        gdn_key_heads=shape.gdn_key_heads,
        gdn_value_heads=shape.gdn_value_heads,
        gdn_key_dim=shape.gdn_key_dim,
        gdn_value_dim=shape.gdn_value_dim,
        num_experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        expert_width=shape.expert_width,
        shared_width=shape.shared_width,
        normalise_top_k=True,
        rms_norm_eps=1e-6,
        tied_embeddings=False,
        max_position_embeddings=shape.max_positions,
        eos_token_ids=(),
    )


def drafter_config(shape: PaddedShape) -> DrafterConfig:
    """Config of the drafter; it reads evenly spread layers."""
    step = shape.layers // shape.draft_target_layers
    return DrafterConfig(
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        num_layers=shape.draft_layers,
        num_heads=shape.draft_heads,
        num_kv_heads=shape.draft_kv_heads,
        head_dim=shape.draft_head_dim,
        mlp_width=shape.draft_width,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        block_size=16,
        mask_token_id=shape.vocab - 1,
        target_layer_ids=tuple(range(1, shape.layers, step))[: shape.draft_target_layers],
        num_target_layers=shape.layers,
    )


class Random:
    """Makes tensors of one dtype on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = STD) -> torch.Tensor:
        """Normal with mean 0."""
        value = torch.empty(shape, device=self.device, dtype=self.dtype)
        return value.normal_(0.0, std, generator=self._generator)

    def near_one(self, *shape: int) -> torch.Tensor:
        """Factors around 1."""
        return self.normal(*shape) + 1.0

    def decays(self, heads: int) -> torch.Tensor:
        """Logarithms of decay rates."""
        rates = torch.empty(heads, device=self.device)
        return rates.uniform_(0.1, 2.0, generator=self._generator).log()


def target_tensors(config: TargetConfig, random: Random) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a target by its Hugging Face name, one at a time."""
    prefix, hidden = config.weight_prefix, config.hidden_size
    yield prefix + "embed_tokens.weight", random.normal(config.vocab_size, hidden)
    yield "lm_head.weight", random.normal(config.vocab_size, hidden)
    yield prefix + "norm.weight", random.normal(hidden)
    values = config.gdn_value_heads * config.gdn_value_dim
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    experts, width = config.num_experts, config.expert_width
    for i, is_attention in enumerate(config.layer_is_attention):
        layer = f"{prefix}layers.{i}."
        yield layer + "input_layernorm.weight", random.normal(hidden)
        yield layer + "post_attention_layernorm.weight", random.normal(hidden)
        if is_attention:
            mixer = layer + "self_attn."
            matrices = {"q_proj": 2 * q, "k_proj": kv, "v_proj": kv}
            yield mixer + "o_proj.weight", random.normal(hidden, q)
            for name in ("q_norm", "k_norm"):
                yield f"{mixer}{name}.weight", random.normal(config.head_dim)
        else:
            mixer = layer + "linear_attn."
            heads = config.gdn_value_heads
            matrices = {
                "in_proj_qkv": config.conv_channels,
                "in_proj_z": values,
                "in_proj_b": heads,
                "in_proj_a": heads,
            }
            shape = (config.conv_channels, 1, config.conv_kernel)
            yield mixer + "conv1d.weight", random.normal(*shape, std=0.5)
            yield mixer + "A_log", random.decays(heads)
            yield mixer + "dt_bias", random.normal(heads)
            yield mixer + "norm.weight", random.near_one(config.gdn_value_dim)
            yield mixer + "out_proj.weight", random.normal(hidden, values)
        for name, rows in matrices.items():
            yield f"{mixer}{name}.weight", random.normal(rows, hidden)
        mlp, shared = layer + "mlp.", layer + "mlp.shared_expert."
        yield mlp + "gate.weight", random.normal(experts, hidden)
        yield mlp + "shared_expert_gate.weight", random.normal(1, hidden)
        yield shared + "gate_proj.weight", random.normal(config.shared_width, hidden)
        yield shared + "up_proj.weight", random.normal(config.shared_width, hidden)
        yield shared + "down_proj.weight", random.normal(hidden, config.shared_width)
        yield mlp + "experts.gate_up_proj", random.normal(experts, 2 * width, hidden)
        yield mlp + "experts.down_proj", random.normal(experts, hidden, width)


def drafter_tensors(config: DrafterConfig, random: Random) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a drafter, likewise."""
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    yield "fc.weight", random.normal(hidden, len(config.target_layer_ids) * hidden)
    yield "hidden_norm.weight", random.near_one(hidden)
    yield "norm.weight", random.near_one(hidden)
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        yield layer + "input_layernorm.weight", random.near_one(hidden)
        yield layer + "post_attention_layernorm.weight", random.near_one(hidden)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield f"{attention}{name}.weight", random.normal(rows, hidden)
        yield attention + "o_proj.weight", random.normal(hidden, q)
        for name in ("q_norm", "k_norm"):
            yield f"{attention}{name}.weight", random.near_one(dim)
        for name in ("gate_proj", "up_proj"):
            yield f"{mlp}{name}.weight", random.normal(config.mlp_width, hidden)
        yield mlp + "down_proj.weight", random.normal(hidden, config.mlp_width)


def routes_with_reuse(
    config: TargetConfig, *, batch: int, rows: int, reuse: float, seed: int
) -> torch.Tensor:
    """int32 routes [layers, batch x rows, top-k] on the host.

    Each choice of a row repeats an expert of the request's earlier rows with probability `reuse`,
    else it is a fresh random one; a row never takes an expert twice.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, top_k = config.num_experts, config.experts_per_token
    table = torch.empty(config.num_layers, batch * rows, top_k, dtype=torch.int32)

    def pick(values: list[int]) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    for layer in range(config.num_layers):
        for request in range(batch):
            seen: list[int] = []
            for row in range(rows):
                chosen: list[int] = []
                repeats = int((torch.rand(top_k, generator=generator) < reuse).sum()) if row else 0
                while len(chosen) < min(repeats, len(seen)):
                    expert = pick(seen)
                    if expert not in chosen:
                        chosen.append(expert)
                while len(chosen) < top_k:
                    expert = int(torch.randint(experts, (1,), generator=generator))
                    if expert not in chosen:
                        chosen.append(expert)
                table[layer, request * rows + row] = torch.tensor(chosen, dtype=torch.int32)
                seen += [expert for expert in chosen if expert not in seen]
    return table


def distinct_of_prefixes(table: torch.Tensor) -> list[float]:
    """Mean distinct experts of a layer over the first 1..rows rows of a single request's table."""
    layers, rows, _ = table.shape
    means = []
    for length in range(1, rows + 1):
        counts = [table[layer, :length].unique().numel() for layer in range(layers)]
        means.append(sum(counts) / layers)
    return means
