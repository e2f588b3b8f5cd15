"""Weights of a pair as the captured forward pass reads them, from any stream of named tensors.

`stream` is a `PaddedPair.target_weights()` made on the card, tensors of a checkpoint folder, or any
other iterable of (Hugging Face name, tensor). It is read once, in any order. Fused tensors are
allocated first and filled in place; a tensor that is needed as it is, is kept and not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from hybridspec.errors import ModelError
from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import DrafterConfig, TargetConfig

ROW_MULTIPLE = 64
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Intake:
    """Names that are expected, and what happens to the tensor of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wanted: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], None]]] = {}

    def into(self, name: str, destination: torch.Tensor) -> None:
        """Copy a tensor into a place of the same number of elements."""

        def place(value: torch.Tensor) -> None:
            destination.copy_(value.reshape(destination.shape))

        self._wanted[name] = (tuple(destination.shape), place)

    def new(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of its own that the named one is copied into."""
        value = torch.empty(shape, dtype=dtype, device=self.device)
        self.into(name, value)
        return value

    def keep(
        self, name: str, shape: tuple[int, ...], store: Callable[[torch.Tensor], None]
    ) -> None:
        """Hand the tensor itself on, without a copy where dtype and device are right."""
        self._wanted[name] = (shape, store)

    def read(self, stream: NamedTensors, *, what: str) -> None:
        """Take every wanted tensor from the stream; others are passed over.

        Raises:
            ModelError: one of another shape, or one that did not come.
        """
        missing = dict(self._wanted)
        for name, value in stream:
            wanted = missing.pop(name, None)
            if wanted is None:
                continue
            shape, place = wanted
            if value.numel() != torch.Size(shape).numel():
                raise ModelError(
                    f"the {what} has {name} of shape {tuple(value.shape)}; config.json asks for "
                    f"{shape}: weights and config are of different models"
                )
            place(value)
        if missing:
            raise ModelError(
                f"the {what} lacks {len(missing)} tensors, {next(iter(missing))} among them: the "
                "folder is incomplete or of another model"
            )


def folder_tensors(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint folder, one at a time on the device."""
    Checkpoint(folder, device)  # refuses a folder that is none, or has a damaged shard
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device=str(device)) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


@dataclass
class GdnWeights:
    """One Gated DeltaNet layer.

    Attributes:
        front_FH: q, k, v, z, b, a. conv_WC: taps, oldest first. A_log_H, dt_bias_H, norm_V: fp32.
    """

    front_FH: torch.Tensor
    conv_WC: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_V: torch.Tensor
    out_HX: torch.Tensor


@dataclass
class AttentionWeights:
    """One full-attention layer; `front_FH` is q, k, v, gate; `norm_2D` fp32 with the scale."""

    front_FH: torch.Tensor
    norm_2D: torch.Tensor
    out_HX: torch.Tensor


@dataclass
class MoeWeights:
    """One sparse block.

    Attributes:
        front_FH: router, gate and up of the shared expert, its own gate, zeros up to whole tiles.
    """

    front_FH: torch.Tensor
    shared_down_HS: torch.Tensor
    gate_up_EFH: torch.Tensor
    down_EHI: torch.Tensor


@dataclass
class TargetWeights:
    """All of a target. Norm weights are fp32 factors, 1 already added."""

    config: TargetConfig
    dtype: torch.dtype
    device: torch.device
    embedding_VH: torch.Tensor
    lm_head_VH: torch.Tensor
    mixers: list[GdnWeights | AttentionWeights]
    blocks: list[MoeWeights]
    input_norms_XH: torch.Tensor
    post_norms_XH: torch.Tensor
    final_norm_H: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        tensors = [self.embedding_VH, self.input_norms_XH, self.post_norms_XH]
        if self.lm_head_VH is not self.embedding_VH:
            tensors.append(self.lm_head_VH)
        for part in (*self.mixers, *self.blocks):
            tensors += vars(part).values()
        return sum(t.numel() * t.element_size() for t in tensors)


def load_target(
    config: TargetConfig,
    stream: NamedTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> TargetWeights:
    """Read a target from named tensors, in one pass and without a second copy.

    Raises:
        ModelError: Qwen3-Next's grouping of projections, missing tensors, other shapes.
    """
    if config.architecture == "Qwen3NextForCausalLM":
        raise ModelError(
            "Qwen3NextForCausalLM stores projections head by head; the captured engine reads "
            "Qwen3.5's layout only: use the eager engine"
        )
    intake = Intake(device)
    prefix, hidden = config.weight_prefix, config.hidden_size
    layers = config.num_layers
    input_norms = torch.empty(layers, hidden, device=device)
    post_norms = torch.empty(layers, hidden, device=device)
    final_norm = torch.empty(hidden, device=device)
    vocabulary: dict[str, torch.Tensor] = {}

    def keep(name: str, shape: tuple[int, ...], store: Callable[[torch.Tensor], None]) -> None:
        intake.keep(name, shape, lambda t: store(t.to(device, dtype).reshape(shape).contiguous()))

    def kept_attribute(owner: object, attribute: str, name: str, *shape: int) -> None:
        keep(name, shape, lambda t: setattr(owner, attribute, t))

    size = (config.vocab_size, hidden)
    keep(prefix + "embed_tokens.weight", size, lambda t: vocabulary.update(embed=t))
    if not config.tied_embeddings:
        keep("lm_head.weight", size, lambda t: vocabulary.update(head=t))
    mixers: list[GdnWeights | AttentionWeights] = []
    blocks: list[MoeWeights] = []
    for i, is_attention in enumerate(config.layer_is_attention):
        layer = f"{prefix}layers.{i}."
        intake.into(layer + "input_layernorm.weight", input_norms[i])
        intake.into(layer + "post_attention_layernorm.weight", post_norms[i])
        mixers.append(
            _attention(intake, config, layer + "self_attn.", dtype, kept_attribute)
            if is_attention
            else _gdn(intake, config, layer + "linear_attn.", dtype, kept_attribute)
        )
        blocks.append(_moe(intake, config, layer + "mlp.", dtype, kept_attribute))
    intake.into(prefix + "norm.weight", final_norm)
    intake.read(stream, what="target")
    for norms in (input_norms, post_norms, final_norm):
        # Qwen3.5 stores norm weights around zero; in the model's dtype, as everything it stores.
        norms.copy_(norms.to(dtype)).add_(1.0)
    for mixer in mixers:
        if isinstance(mixer, AttentionWeights):
            mixer.norm_2D.copy_(mixer.norm_2D.to(dtype)).add_(1.0)
            mixer.norm_2D[0] *= config.head_dim**-0.5
    return TargetWeights(
        config,
        dtype,
        device,
        vocabulary["embed"],
        vocabulary["embed"] if config.tied_embeddings else vocabulary["head"],
        mixers,
        blocks,
        input_norms,
        post_norms,
        final_norm,
    )


def _discard(_: object) -> None:
    """A statement in a lambda."""


Keeper = Callable[..., None]
_UNSET = torch.empty(0)


def _gdn(
    intake: Intake, config: TargetConfig, prefix: str, dtype: torch.dtype, keep: Keeper
) -> GdnWeights:
    hidden, heads = config.hidden_size, config.gdn_value_heads
    values = heads * config.gdn_value_dim
    sizes = (config.conv_channels, values, heads, heads)
    front = torch.empty(sum(sizes), hidden, dtype=dtype, device=intake.device)
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    for name, rows in zip(names, front.split(sizes), strict=True):
        intake.into(f"{prefix}{name}.weight", rows)
    taps = config.conv_kernel
    conv = torch.empty(taps, config.conv_channels, dtype=dtype, device=intake.device)
    intake.keep(
        prefix + "conv1d.weight",
        (config.conv_channels, 1, taps),
        lambda t: _discard(conv.copy_(t.reshape(config.conv_channels, taps).t())),
    )
    weights = GdnWeights(
        front,
        conv,
        intake.new(prefix + "A_log", heads, dtype=torch.float32),
        intake.new(prefix + "dt_bias", heads, dtype=torch.float32),
        intake.new(prefix + "norm.weight", config.gdn_value_dim, dtype=torch.float32),
        _UNSET,
    )
    keep(weights, "out_HX", prefix + "out_proj.weight", hidden, values)
    return weights


def _attention(
    intake: Intake, config: TargetConfig, prefix: str, dtype: torch.dtype, keep: Keeper
) -> AttentionWeights:
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    front = torch.empty(2 * q + 2 * kv, hidden, dtype=dtype, device=intake.device)

    def queries(value: torch.Tensor) -> None:
        # A head's query and its output gate lie behind one another in the checkpoint.
        parts = value.reshape(config.num_heads, 2, dim, hidden)
        front[:q].view(config.num_heads, dim, hidden).copy_(parts[:, 0])
        front[q + 2 * kv :].view(config.num_heads, dim, hidden).copy_(parts[:, 1])

    intake.keep(prefix + "q_proj.weight", (2 * q, hidden), queries)
    intake.into(prefix + "k_proj.weight", front[q : q + kv])
    intake.into(prefix + "v_proj.weight", front[q + kv : q + 2 * kv])
    norm = torch.empty(2, dim, device=intake.device)
    intake.into(prefix + "q_norm.weight", norm[0])
    intake.into(prefix + "k_norm.weight", norm[1])
    weights = AttentionWeights(front, norm, _UNSET)
    keep(weights, "out_HX", prefix + "o_proj.weight", hidden, q)
    return weights


def _moe(
    intake: Intake, config: TargetConfig, prefix: str, dtype: torch.dtype, keep: Keeper
) -> MoeWeights:
    hidden, experts, width = config.hidden_size, config.num_experts, config.expert_width
    sizes = (experts, config.shared_width, config.shared_width, 1)
    # Whole tiles of rows: a product whose rows are an odd number of elements is a slow one.
    padding = -sum(sizes) % ROW_MULTIPLE
    front = torch.zeros(sum(sizes) + padding, hidden, dtype=dtype, device=intake.device)
    names = (
        "gate",
        "shared_expert.gate_proj",
        "shared_expert.up_proj",
        "shared_expert_gate",
    )
    for name, rows in zip(names, front.split((*sizes, padding)), strict=False):
        intake.into(f"{prefix}{name}.weight", rows)
    weights = MoeWeights(front, _UNSET, _UNSET, _UNSET)
    keep(
        weights,
        "shared_down_HS",
        prefix + "shared_expert.down_proj.weight",
        hidden,
        config.shared_width,
    )
    keep(weights, "gate_up_EFH", prefix + "experts.gate_up_proj", experts, 2 * width, hidden)
    keep(weights, "down_EHI", prefix + "experts.down_proj", experts, hidden, width)
    return weights


@dataclass
class DrafterLayer:
    """One drafter layer; `norm_2D` are fp32 weights of queries (with the scale) and keys."""

    input_norm_H: torch.Tensor
    qkv_FH: torch.Tensor
    norm_2D: torch.Tensor
    out_HX: torch.Tensor
    post_norm_H: torch.Tensor
    gate_up_FH: torch.Tensor
    down_HI: torch.Tensor


@dataclass
class DrafterWeights:
    """All of a drafter; embedding and LM head are the target's.

    Attributes:
        context_kv_FH: keys and values of every layer, [layers x 2 x KV heads x D, H].
        context_norms_LD: fp32 norm weights of the context's keys.
    """

    config: DrafterConfig
    fuse_HF: torch.Tensor
    hidden_norm_H: torch.Tensor
    context_kv_FH: torch.Tensor
    context_norms_LD: torch.Tensor
    layers: list[DrafterLayer]
    final_norm_H: torch.Tensor


def load_drafter(
    config: DrafterConfig,
    stream: NamedTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DrafterWeights:
    """Read a drafter from named tensors.

    Raises:
        ModelError: missing tensors, other shapes.
    """
    intake = Intake(device)
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    features = len(config.target_layer_ids) * hidden

    def new(*shape: int, wide: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32 if wide else dtype, device=device)

    layers = []
    for i in range(config.num_layers):
        prefix, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        layer = DrafterLayer(
            intake.new(prefix + "input_layernorm.weight", hidden, dtype=torch.float32),
            new(q + 2 * kv, hidden),
            new(2, dim, wide=True),
            intake.new(attention + "o_proj.weight", hidden, q, dtype=dtype),
            intake.new(prefix + "post_attention_layernorm.weight", hidden, dtype=torch.float32),
            new(2 * config.mlp_width, hidden),
            intake.new(prefix + "mlp.down_proj.weight", hidden, config.mlp_width, dtype=dtype),
        )
        for name, rows in zip("qkv", layer.qkv_FH.split((q, kv, kv)), strict=True):
            intake.into(f"{attention}{name}_proj.weight", rows)
        for name, row in zip("qk", layer.norm_2D, strict=True):
            intake.into(f"{attention}{name}_norm.weight", row)
        for name, rows in zip(("gate", "up"), layer.gate_up_FH.chunk(2), strict=True):
            intake.into(f"{prefix}mlp.{name}_proj.weight", rows)
        layers.append(layer)
    fuse = intake.new("fc.weight", hidden, features, dtype=dtype)
    hidden_norm = intake.new("hidden_norm.weight", hidden, dtype=torch.float32)
    final_norm = intake.new("norm.weight", hidden, dtype=torch.float32)
    intake.read(stream, what="drafter")
    for layer in layers:
        layer.norm_2D[0] *= dim**-0.5
    return DrafterWeights(
        config,
        fuse,
        hidden_norm,
        torch.cat([layer.qkv_FH[q:] for layer in layers]),
        torch.stack([layer.norm_2D[1] for layer in layers]),
        layers,
        final_norm,
    )
