"""How a trained pair fits into a larger shape without a change of what it computes.

The residual stream of the padded target holds `n` copies of the source's, copy i times a power of
two s_i, with sum(s_i^2) = hidden / source hidden. The mean square, and with it every RMS norm and
its eps, is then the source's up to the order of summation; norm weights stay as they are, matrices
change by powers of two only, and bf16 weights stay exact. What is added reads but writes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hybridspec.demo.presets import FULL_ATTENTION_INTERVAL
from hybridspec.errors import ModelError, UsageError
from hybridspec.reference.config import DrafterConfig, TargetConfig


@dataclass(frozen=True)
class PaddedShape:
    """Shape to pad to; by default that of Qwen3.6-35B-A3B and its DFlash drafter of 8 layers.

    Every fourth layer is full attention, the others Gated DeltaNet. Names are those of
    `PairPreset`; `draft_target_layers` is how many of the target's layers the drafter reads.
    """

    layers: int = 40
    hidden: int = 2048
    vocab: int = 248_320
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    gdn_key_heads: int = 16
    gdn_value_heads: int = 32
    gdn_key_dim: int = 128
    gdn_value_dim: int = 128
    experts: int = 256
    experts_per_token: int = 8
    expert_width: int = 512
    shared_width: int = 512
    draft_layers: int = 8
    draft_heads: int = 32
    draft_kv_heads: int = 4
    draft_head_dim: int = 128
    draft_width: int = 6144
    draft_target_layers: int = 5
    max_positions: int = 262_144

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise UsageError(
                    f"{field.name} = {getattr(self, field.name)} must be >= 1: raise it with --set"
                )
        for many, few in (
            ("heads", "kv_heads"),
            ("gdn_value_heads", "gdn_key_heads"),
            ("draft_heads", "draft_kv_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise UsageError(
                    f"{many} = {getattr(self, many)} must be a multiple of {few} = "
                    f"{getattr(self, few)}: change one of them with --set"
                )

    @property
    def layer_is_attention(self) -> tuple[bool, ...]:
        """One flag a layer."""
        return tuple((i + 1) % FULL_ATTENTION_INTERVAL == 0 for i in range(self.layers))

    def override(self, assignments: Sequence[str]) -> PaddedShape:
        """The shape with `field=value` overrides.

        Raises:
            UsageError: no such field, or a value that is no integer.
        """
        names = [field.name for field in dataclasses.fields(self)]
        changes: dict[str, int] = {}
        for assignment in assignments:
            key, _, value = assignment.partition("=")
            if key not in names or not value.strip().isdigit():
                raise UsageError(
                    f"--set {assignment!r} is not FIELD=INTEGER with a field of the shape: use one "
                    f"of {', '.join(names)}"
                )
            changes[key] = int(value)
        return dataclasses.replace(self, **changes)


QWEN36_35B_A3B = PaddedShape()


@dataclass(frozen=True)
class Padding:
    """Where the parts of the source pair lie in the padded one.

    Attributes:
        copy_scales: factor of each copy of the residual stream, powers of two; copy i takes the
            dimensions i x source hidden and on.
        constant_dim: dimension of the residual stream that holds a constant, which only the padded
            vocabulary's rows of the LM head read; None where no vocabulary is added.
        live_layers: padded layer of each source layer, rising.
        router_layers: source layer whose router each padded layer has.
        taps: target layers that the drafter reads, rising, each with the source's tap that it
            carries, or None for one that is read with zero weight.
        query_heads, value_heads, draft_heads: padded head of each source head, so that grouped
            heads keep the key head they share.
    """

    copy_scales: tuple[float, ...]
    constant_dim: int | None
    live_layers: tuple[int, ...]
    router_layers: tuple[int, ...]
    taps: tuple[tuple[int, int | None], ...]
    query_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    draft_heads: tuple[int, ...]


def plan_padding(target: TargetConfig, drafter: DrafterConfig, shape: PaddedShape) -> Padding:
    """Fit a pair into a shape.

    Raises:
        ModelError: the pair cannot be padded to this shape; says which number stands against it.
    """
    _check_sizes(target, drafter, shape)
    scales = copy_scales(target.hidden_size, shape.hidden)
    spare = shape.hidden - len(scales) * target.hidden_size
    if shape.vocab > target.vocab_size and not spare:
        raise ModelError(
            f"hidden {shape.hidden} is {shape.hidden // target.hidden_size} times the pair's "
            f"{target.hidden_size}, which leaves no dimension to hold down the added vocabulary: "
            f"use 4 times or more, or --set vocab={target.vocab_size}"
        )
    live = place_layers(target.layer_is_attention, shape.layer_is_attention)
    return Padding(
        copy_scales=scales,
        constant_dim=shape.hidden - 1 if shape.vocab > target.vocab_size else None,
        live_layers=live,
        router_layers=borrow_routers(live, shape.layers),
        taps=place_taps(drafter.target_layer_ids, live, shape),
        query_heads=spread_heads(
            target.num_heads, target.num_kv_heads, shape.heads, shape.kv_heads
        ),
        value_heads=spread_heads(
            target.gdn_value_heads,
            target.gdn_key_heads,
            shape.gdn_value_heads,
            shape.gdn_key_heads,
        ),
        draft_heads=spread_heads(
            drafter.num_heads, drafter.num_kv_heads, shape.draft_heads, shape.draft_kv_heads
        ),
    )


def _check_sizes(target: TargetConfig, drafter: DrafterConfig, shape: PaddedShape) -> None:
    fixed = {
        "head_dim": target.head_dim,
        "gdn_key_dim": target.gdn_key_dim,
        "gdn_value_dim": target.gdn_value_dim,
        "experts": target.num_experts,
        "experts_per_token": target.experts_per_token,
        "draft_head_dim": drafter.head_dim,
    }
    for name, have in fixed.items():
        if have != getattr(shape, name):
            raise ModelError(
                f"the pair has {name} = {have} and the shape {getattr(shape, name)}; padding "
                f"cannot change it: use a pair of that shape (preset lab for the full shape), or "
                f"--set {name}={have}"
            )
    growing = {
        "layers": target.num_layers,
        "hidden": target.hidden_size,
        "vocab": target.vocab_size,
        "kv_heads": target.num_kv_heads,
        "heads": target.num_heads,
        "gdn_key_heads": target.gdn_key_heads,
        "gdn_value_heads": target.gdn_value_heads,
        "expert_width": target.expert_width,
        "shared_width": target.shared_width,
        "draft_layers": drafter.num_layers,
        "draft_kv_heads": drafter.num_kv_heads,
        "draft_heads": drafter.num_heads,
        "draft_width": drafter.mlp_width,
        "draft_target_layers": len(drafter.target_layer_ids),
        "max_positions": max(64, drafter.block_size),
    }
    for name, have in growing.items():
        if have > getattr(shape, name):
            raise ModelError(
                f"the shape has {name} = {getattr(shape, name)}, smaller than the pair's {have}; "
                f"padding only adds: use --set {name}={have} or more"
            )


def copy_scales(source_hidden: int, hidden: int) -> tuple[float, ...]:
    """Powers of two whose squares sum to hidden / source_hidden, largest first.

    Raises:
        ModelError: the ratio is no whole number, so no such powers fit.
    """
    ratio, rest = divmod(hidden, source_hidden)
    if rest or ratio < 1:
        raise ModelError(
            f"hidden {hidden} is {hidden / source_hidden:.4g} times the pair's {source_hidden}; "
            "a whole number is needed to keep norms exact: use a pair with a divisor of it "
            "(preset lab has 256) or --set hidden"
        )
    scales: list[float] = []
    power = 1
    while power * 4 <= ratio:
        power *= 4
    while ratio:
        while power > ratio:
            power //= 4
        scales.append(float(1 << (power.bit_length() // 2)))
        ratio -= power
    return tuple(scales)


def place_layers(source: Sequence[bool], padded: Sequence[bool]) -> tuple[int, ...]:
    """Padded layer of each source layer, of the same kind and spread evenly over the depth.

    Args:
        source, padded: one flag a layer, True for full attention.

    Raises:
        ModelError: the kinds do not fit in this order.
    """
    latest: list[int] = []
    end = len(padded)
    for kind in reversed(source):
        end = max((p for p in range(end) if padded[p] == kind), default=-1)
        if end < 0:
            raise ModelError(
                f"the pair's {len(source)} layers, {sum(source)} of them full attention, do not "
                f"fit in this order into {len(padded)} with every fourth full attention: use "
                "more --set layers"
            )
        latest.insert(0, end)
    placed: list[int] = []
    for j, kind in enumerate(source):
        wanted = j * len(padded) / len(source)
        first = placed[-1] + 1 if placed else 0
        fits = [p for p in range(first, latest[j] + 1) if padded[p] == kind]
        placed.append(min(fits, key=lambda p: (abs(p - wanted), p)))
    return tuple(placed)


def borrow_routers(live: Sequence[int], layers: int) -> tuple[int, ...]:
    """Source layer whose router each padded layer has; live layers keep their own.

    The k-th added layer behind source layer a sees the residual that enters layer a + 1. It takes
    the router of the k-th nearest to a + 1, so that neighbours route differently, each much as the
    router's own layer does.
    """
    position = {p: j for j, p in enumerate(live)}
    routers, order, k = [], list(range(len(live))), 0
    for i in range(layers):
        if i in position:
            after = position[i]
            order = sorted(range(len(live)), key=lambda j, a=after: (abs(j - a - 1), j))
            routers.append(after)
            k = 0
        else:
            routers.append(order[k % len(order)])
            k += 1
    return tuple(routers)


def place_taps(
    source_taps: Sequence[int], live: Sequence[int], shape: PaddedShape
) -> tuple[tuple[int, int | None], ...]:
    """Target layers that the padded drafter reads.

    Source taps sit at their live layers. The others are as far from them as can be, and not the
    last layer, whose output some engines do not hand out.
    """
    taps: list[tuple[int, int | None]] = [(live[j], index) for index, j in enumerate(source_taps)]
    while len(taps) < shape.draft_target_layers:
        used = [layer for layer, _ in taps]
        free = [i for i in range(shape.layers - 1) if i not in used]
        if not free:
            raise ModelError(
                f"the drafter is to read {shape.draft_target_layers} of {shape.layers} layers; at "
                "most all but the last can be read: use a smaller --set draft_target_layers"
            )
        taps.append((max(free, key=lambda i: min(abs(i - u) for u in used)), None))
    return tuple(sorted(taps, key=lambda tap: tap[0]))


def spread_heads(heads: int, groups: int, padded_heads: int, padded_groups: int) -> tuple[int, ...]:
    """Padded head of each head, such that head h keeps the key head h // (heads / groups).

    Raises:
        ModelError: fewer heads a group than the source has.
    """
    per_group, padded_per_group = heads // groups, padded_heads // padded_groups
    if padded_per_group < per_group:
        raise ModelError(
            f"{padded_heads} heads in {padded_groups} groups are {padded_per_group} a group; the "
            f"pair has {per_group}: use more heads or fewer groups"
        )
    return tuple((h // per_group) * padded_per_group + h % per_group for h in range(heads))
