"""How the target half launches its kernels, and what it does for a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.dispatch import FIRST_WITH_DEPENDENT_LAUNCH, architecture_of
from hybridspec.kernels.route_mask.route_mask import MODES, MaskMode


@dataclass(frozen=True)
class LaunchOptions:
    """Choices of developers and of the profiler; `small_moe` is a key of the configuration too.

    Attributes:
        dependent_launch: conv and GDN kernels start while the kernel ahead ends (sm_90 and later);
            None: where there is that.
        mask_mode: of rows past the length, see `kernels/route_mask`. `drop` is refused, because
            batches of more than one request always run in SGLang's Triton runner.
        small_moe: experts in two launches of our own where a pass has at most 16 rows.
        fused_router: routers and the mask behind them in one launch where a router is a plain
            softmax, with SGLang's bits; other routers are SGLang's own, with a launch for the mask.
        fused_gate: with both of these, the gate's product too is our own, which the router adds up:
            logits are sums in another order than the library's, rounded to bf16 like its.
        own_streams: a captured pass with small_moe launches the experts before the shared expert
            and copies no input; SGLang launches them second and copies it.
        keep_routes: a verify pass copies the experts of every row and layer, as routers chose them,
            to `RoutedExperts.kept_XRK`; one more launch a layer where its router is SGLang's own.
        sequential_gdn: rounds of one request run the sequential form of GDN verification, whose
            time grows with the length, in place of the block form's, which hardly does. Measured
            alone it is ahead up to about 4 rows; not measured in an engine.
        force_routes: a verify pass takes experts from `RoutedExperts.forced_XRK` in place of the
            routers' own, with their weights: for measuring costs, the output is no longer the
            target's.
    """

    dependent_launch: bool | None = None
    mask_mode: MaskMode = "alias"
    small_moe: bool = False
    fused_router: bool = True
    fused_gate: bool = False
    own_streams: bool = True
    keep_routes: bool = False
    sequential_gdn: bool = False
    force_routes: bool = False

    def __post_init__(self) -> None:
        if self.fused_gate and not (self.small_moe and self.fused_router):
            raise UsageError(
                "fused_gate without small_moe or without fused_router; it runs between the two: "
                "set all three"
            )
        if self.mask_mode not in MODES:
            raise UsageError(
                f"mask mode {self.mask_mode!r} is unknown; take one of {', '.join(MODES)}"
            )
        if self.mask_mode == "drop":
            raise UsageError(
                "mask mode 'drop' writes expert ids of -1, and SGLang's Triton runner reads the "
                "weights of expert -1 where experts are not distributed: use 'alias'"
            )

    def dependent_on(self, device: torch.device) -> bool:
        """Whether launches on this device are dependent ones."""
        able = architecture_of(device) >= FIRST_WITH_DEPENDENT_LAUNCH
        return able if self.dependent_launch is None else self.dependent_launch


def switched(kind: type[Any], switches: Mapping[str, bool], *others: type[Any]) -> dict[str, Any]:
    """Those of the configuration's switches that are fields of `kind`.

    Args:
        others: classes that the rest may belong to.

    Raises:
        UsageError: a switch that none of them has.
    """
    known = {field.name for one in (kind, *others) for field in fields(one)}
    wrong = sorted(set(switches) - known)
    if wrong:
        raise UsageError(f"switches: {wrong[0]!r} is unknown; known are {', '.join(sorted(known))}")
    return {field.name: switches[field.name] for field in fields(kind) if field.name in switches}


def launch_options(
    switches: Mapping[str, bool], *others: type[Any], small_moe: bool, keep_routes: bool
) -> LaunchOptions:
    """Options of a server: switches go before what the configuration's other keys say.

    The gate's product follows the kernels that it runs between, unless a switch names it.

    Args:
        others: as in `switched`.
        small_moe, keep_routes: as the keys of the configuration have them.

    Raises:
        UsageError: a switch that there is not, or options that do not fit together.
    """
    chosen: dict[str, Any] = {"small_moe": small_moe, "keep_routes": keep_routes}
    chosen |= switched(LaunchOptions, switches, *others)
    gate = chosen["small_moe"] and chosen.get("fused_router", LaunchOptions.fused_router)
    return LaunchOptions(**{"fused_gate": gate, **chosen})
