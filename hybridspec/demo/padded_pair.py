"""A trained pair padded to a larger shape: its configs and, one at a time, its tensors.

pair = PaddedPair.open(folder, QWEN36_35B_A3B, device=torch.device("cuda"))
for name, tensor in pair.target_weights():
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridspec.artifacts.digest import model_digest
from hybridspec.demo.padded_config import padded_drafter_config, padded_target_config
from hybridspec.demo.padded_noise import Noise
from hybridspec.demo.padded_shape import PaddedShape, Padding, plan_padding
from hybridspec.demo.padded_weights import (
    CONSTANT,
    CONSTANT_GAIN,
    PADDED_ROW,
    PaddedWeights,
    Padder,
    Recipe,
    spans,
)
from hybridspec.errors import ModelError
from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import (
    DrafterConfig,
    TargetConfig,
    check_pair,
    load_drafter_config,
    load_target_config,
    read_json,
)

_SUPPORTED = "Qwen3_5MoeForConditionalGeneration"


@dataclass(frozen=True)
class PaddedPair:
    """A source pair and where its parts lie in the padded one.

    Attributes:
        target, drafter: shapes of the source.
        dtype: of the padded weights; decay rates and GDN output norms stay fp32.
        device: where tensors are made.
    """

    folder: Path
    shape: PaddedShape
    padding: Padding
    target: TargetConfig
    drafter: DrafterConfig
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def open(
        cls,
        folder: Path,
        shape: PaddedShape,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
    ) -> PaddedPair:
        """Plan the padding of `folder/target` and `folder/drafter`; reads their configs only.

        Raises:
            ModelError: no such pair, or one that cannot be padded to this shape.
        """
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder; a pair has target/ and drafter/ in it")
        target = load_target_config(folder / "target")
        if target.architecture != _SUPPORTED:
            raise ModelError(f"{folder} has a {target.architecture}; only {_SUPPORTED} is padded")
        drafter = load_drafter_config(folder / "drafter")
        check_pair(target, drafter, folder / "drafter")
        padding = plan_padding(target, drafter, shape)
        return cls(folder, shape, padding, target, drafter, dtype, device or torch.device("cpu"))

    def configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`config.json` of target and drafter, with the digests of the source pair in both."""
        digests = {
            "target_sha256": model_digest(self.folder / "target"),
            "drafter_sha256": model_digest(self.folder / "drafter"),
        }
        return (
            padded_target_config(
                read_json(self.folder / "target", "config.json"),
                self.shape, self.padding, self.dtype, digests,
            ),
            padded_drafter_config(
                read_json(self.folder / "drafter", "config.json"),
                self.shape, self.padding, self.dtype, digests,
            ),
        )  # fmt: skip

    def _padder(self, part: str, noise: Noise) -> Padder:
        return Padder(
            Checkpoint(self.folder / part, self.device),
            noise,
            self.padding,
            label=f"{part}/",
            source_hidden=self.target.hidden_size,
            hidden=self.shape.hidden,
            dtype=self.dtype,
        )

    def target_weights(self) -> PaddedWeights:
        """Tensors of the target."""
        padder = self._padder("target", Noise(self.device))
        return PaddedWeights(self._target(padder))

    def drafter_weights(self) -> PaddedWeights:
        """Tensors of the drafter, which embeds and predicts with the target's."""
        padder = self._padder("drafter", Noise(self.device))
        return PaddedWeights(self._drafter(padder))

    # ------------------------------------------------------------------ target

    def _target(self, p: Padder) -> Iterator[Recipe]:
        root = self.target.weight_prefix
        vocabulary = (self.shape.vocab, self.shape.hidden)
        source = (self.target.vocab_size, self.target.hidden_size)

        def embedding(name: str = root + "embed_tokens.weight") -> torch.Tensor:
            out = p.filler(name, vocabulary)
            out[:, p.copied :] = 0
            value = p.read(name, *source)
            for dims, scale in p.copies():
                out[: source[0], dims] = value * scale
            if self.padding.constant_dim is not None:
                out[:, self.padding.constant_dim] = CONSTANT
            return out

        def lm_head(name: str = "lm_head.weight") -> torch.Tensor:
            out = p.filler(name, vocabulary)
            tied = root + "embed_tokens.weight"
            value = p.read(tied if self.target.tied_embeddings else name, *source)
            p.read_first_copy(out, torch.arange(source[0], device=self.device), value)
            if self.padding.constant_dim is not None:
                out[source[0] :, self.padding.constant_dim] = PADDED_ROW
            return out

        yield p.recipe(root + "embed_tokens.weight", vocabulary, embedding)
        position = {layer: j for j, layer in enumerate(self.padding.live_layers)}
        for i, is_attention in enumerate(self.shape.layer_is_attention):
            layer = f"{root}layers.{i}."
            live = f"{root}layers.{position[i]}." if i in position else None
            router = f"{root}layers.{self.padding.router_layers[i]}."
            yield p.norm(
                layer + "input_layernorm.weight", router + "input_layernorm.weight", neutral=0.0
            )
            yield from (self._attention if is_attention else self._gdn)(p, layer, live)
            name = "post_attention_layernorm.weight"
            yield p.norm(layer + name, router + name, neutral=0.0)
            yield from self._experts(p, layer, live, router, i)
        yield p.norm(
            root + "norm.weight", root + "norm.weight", neutral=0.0, gain=CONSTANT_GAIN - 1.0
        )
        yield p.recipe("lm_head.weight", vocabulary, lm_head)

    def _attention(self, p: Padder, layer: str, live: str | None) -> Iterator[Recipe]:
        shape, source, dim = self.shape, self.target, self.shape.head_dim
        at = "self_attn."

        def src(name: str) -> str | None:
            return live and live + at + name

        hidden, kv = shape.hidden, spans(range(source.num_kv_heads), dim)
        heads = self.padding.query_heads
        # A head's query and its output gate lie behind one another.
        for name, rows, places in (
            ("q_proj.weight", shape.heads * 2 * dim, spans(heads, 2 * dim)),
            ("k_proj.weight", shape.kv_heads * dim, kv),
            ("v_proj.weight", shape.kv_heads * dim, kv),
        ):
            yield p.reader(layer + at + name, (rows, hidden), src(name), places)
        yield p.writer(
            layer + at + "o_proj.weight",
            (hidden, shape.heads * dim),
            src("o_proj.weight"),
            (source.hidden_size, source.num_heads * dim),
            spans(heads, dim),
        )
        for name in ("q_norm.weight", "k_norm.weight"):
            yield p.placed(layer + at + name, (dim,), src(name), range(dim), fill=0.0)

    def _gdn(self, p: Padder, layer: str, live: str | None) -> Iterator[Recipe]:
        shape, source, at = self.shape, self.target, "linear_attn."

        def src(name: str) -> str | None:
            return live and live + at + name

        hidden, heads = shape.hidden, self.padding.value_heads
        keys = spans(range(source.gdn_key_heads), shape.gdn_key_dim)
        values = spans(heads, shape.gdn_value_dim)
        keys_width = shape.gdn_key_heads * shape.gdn_key_dim
        values_width = shape.gdn_value_heads * shape.gdn_value_dim
        channels = 2 * keys_width + values_width
        mixed = [*keys, *(keys_width + k for k in keys), *(2 * keys_width + v for v in values)]
        for name, rows, places in (
            ("in_proj_qkv.weight", channels, mixed),
            ("in_proj_z.weight", values_width, values),
            ("in_proj_b.weight", shape.gdn_value_heads, heads),
            ("in_proj_a.weight", shape.gdn_value_heads, heads),
        ):
            yield p.reader(layer + at + name, (rows, hidden), src(name), places)
        kernel = (channels, 1, source.conv_kernel)
        yield p.placed(layer + at + "conv1d.weight", kernel, src("conv1d.weight"), mixed, fill=0.25)
        # Decay rate 1 and no bias: the states of added heads forget within a few tokens.
        for name in ("dt_bias", "A_log"):
            size = (shape.gdn_value_heads,)
            yield p.placed(layer + at + name, size, src(name), heads, fill=0.0)
        dims = range(shape.gdn_value_dim)
        yield p.placed(layer + at + "norm.weight", (len(dims),), src("norm.weight"), dims, fill=1.0)
        yield p.writer(
            layer + at + "out_proj.weight",
            (hidden, values_width),
            src("out_proj.weight"),
            (source.hidden_size, source.gdn_value_heads * source.gdn_value_dim),
            values,
        )

    def _experts(
        self, p: Padder, layer: str, live: str | None, router: str, index: int
    ) -> Iterator[Recipe]:
        shape, source, at = self.shape, self.target, "mlp."
        hidden, small, count = shape.hidden, source.hidden_size, shape.experts

        def src(name: str) -> str | None:
            return live and live + at + name

        experts = range(count)
        if live is None:
            # Other experts than the layer that the router comes from, as often and as alike.
            order = torch.randperm(count, generator=torch.Generator().manual_seed(index))
            experts = order.tolist()
        yield p.reader(layer + at + "gate.weight", (count, hidden), router + at + "gate.weight",
                       experts)  # fmt: skip
        width, wide = source.expert_width, shape.expert_width
        # All gate rows of an expert come before all its up rows.
        halves = [*range(width), *range(wide, wide + width)]
        yield p.reader(
            layer + at + "experts.gate_up_proj",
            (count, 2 * wide, hidden),
            src("experts.gate_up_proj"),
            [expert * 2 * wide + row for expert in range(count) for row in halves],
            (count, 2 * width, small),
        )
        yield p.writer(
            layer + at + "experts.down_proj",
            (count, hidden, wide),
            src("experts.down_proj"),
            (count, small, width),
            range(width),
        )
        yield from self._mlp(
            p, layer + at + "shared_expert.", live and live + at + "shared_expert.",
            shape.shared_width, source.shared_width,
        )  # fmt: skip
        yield p.reader(layer + at + "shared_expert_gate.weight", (1, hidden),
                       src("shared_expert_gate.weight"), [0])  # fmt: skip

    def _mlp(
        self, p: Padder, name: str, source: str | None, width: int, source_width: int
    ) -> Iterator[Recipe]:
        for part in ("gate_proj.weight", "up_proj.weight"):
            yield p.reader(
                name + part, (width, p.hidden), source and source + part, range(source_width)
            )
        yield p.writer(
            name + "down_proj.weight",
            (p.hidden, width),
            source and source + "down_proj.weight",
            (p.source_hidden, source_width),
            range(source_width),
        )

    # ------------------------------------------------------------------ drafter

    def _drafter(self, p: Padder) -> Iterator[Recipe]:
        shape, source, dim = self.shape, self.drafter, self.shape.draft_head_dim
        hidden, heads = shape.hidden, self.padding.draft_heads
        kv = spans(range(source.num_kv_heads), dim)
        kv_rows = shape.draft_kv_heads * dim
        for i in range(shape.draft_layers):
            layer = f"layers.{i}."
            live = layer if i < source.num_layers else None
            normed = f"layers.{i % source.num_layers}."
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                yield p.norm(layer + name, normed + name, neutral=1.0)
            for name, rows, places in (
                ("self_attn.q_proj.weight", shape.draft_heads * dim, spans(heads, dim)),
                ("self_attn.k_proj.weight", kv_rows, kv),
                ("self_attn.v_proj.weight", kv_rows, kv),
            ):
                yield p.reader(layer + name, (rows, hidden), live and live + name, places)
            name = "self_attn.o_proj.weight"
            yield p.writer(
                layer + name,
                (hidden, shape.draft_heads * dim),
                live and live + name,
                (source.hidden_size, source.num_heads * dim),
                spans(heads, dim),
            )
            for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                yield p.placed(layer + name, (dim,), live and live + name, range(dim), fill=1.0)
            yield from self._mlp(
                p, layer + "mlp.", live and live + "mlp.", shape.draft_width, source.mlp_width
            )
        features = (hidden, len(self.padding.taps) * hidden)

        def fuse() -> torch.Tensor:
            small = source.hidden_size
            value = p.read("fc.weight", small, len(source.target_layer_ids) * small)
            out = torch.zeros(features, dtype=p.dtype, device=self.device)
            for place, (_, tap) in enumerate(self.padding.taps):
                if tap is None:
                    continue
                block = value[:, tap * small : (tap + 1) * small] / self.padding.copy_scales[0]
                for dims, scale in p.copies():
                    out[dims, place * hidden : place * hidden + small] = block * scale
            return out

        yield p.recipe("fc.weight", features, fuse)
        yield p.norm("hidden_norm.weight", "hidden_norm.weight", neutral=1.0)
        yield p.norm("norm.weight", "norm.weight", neutral=1.0, gain=CONSTANT_GAIN)
