"""Dense projections of a block of rows in kernels of our own, where those were measured faster."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from hybridspec.compat import sglang_0_5_16_linears as compat
from hybridspec.kernels.gdn.dispatch import architecture_of
from hybridspec.kernels.skinny_linear.linear import (
    Workspace,
    skinny_linear,
    skinny_linear_pair,
)
from hybridspec.kernels.skinny_linear.table import Shape, tiles_for
from hybridspec.kernels.skinny_linear.tiles import MAX_ROWS, ROW_TILES, Tiles, row_tile
from hybridspec.sglang_plugin.target.scope import VerifyScope

logger = logging.getLogger(__name__)


class BlockProjections:
    """Takes the place of the products of one model's projections while its scope is on.

    Prefill and plain decoding keep the engine's. With tensor parallelism products are those of the
    rank's own weights, and the engine sums over ranks as before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        scope: VerifyScope,
        device: torch.device,
        *,
        outside: tuple[Any, ...] = (),
    ) -> None:
        """Nothing is replaced yet; `install` does that.

        Args:
            scope: on in the passes that take the kernels.
            outside: modules that run outside of those passes, and take the kernels wherever they
                have few enough rows.
        """
        self.scope = scope
        self.device = device
        self.outside = {id(module) for module in outside}
        self.architecture = architecture_of(device)
        self.layers: Counter[Shape] = Counter()
        self._workspaces: dict[tuple[Shape, int], Workspace] = {}
        self._products: list[tuple[Any, compat.Product]] = []
        self._collect(model)

    def install(self) -> None:
        """Replace the products of all projections that have tiles."""
        for module, product in self._products:
            compat.replace_product(module, product)

    def compile(self) -> None:
        """Run every kernel once, so that no capture compiles."""
        seen: set[tuple[Shape, int]] = set()
        with torch.inference_mode(), self.scope.entered():
            for module, product in self._products:
                weight_NK = module.weight
                for rows in ROW_TILES:
                    if isinstance(product, _SecondOfPair):
                        continue
                    assert isinstance(product, _Single | _FirstOfPair)
                    if (product.shape, rows) in seen:
                        continue
                    seen.add((product.shape, rows))
                    product(weight_NK.new_zeros(rows, weight_NK.shape[1]))
        for _, product in self._products:
            if isinstance(product, _SecondOfPair):
                product.first.kept = None

    def sentence(self) -> str:
        """For the log: how many layers of which shapes."""
        if not self.layers:
            return "all of the engine"
        return ", ".join(
            f"{count} x [{outputs}{f' + {beside}' if beside else ''}, {inputs}]"
            for (outputs, beside, inputs), count in sorted(self.layers.items())
        )

    def tiles(self, shape: Shape, num_rows: int) -> Tiles | None:
        """Tiles of a product, None where it stays the engine's."""
        outputs, beside, inputs = shape
        return tiles_for(num_rows, outputs, inputs, self.architecture, beside=beside)

    def workspace(self, shape: Shape, num_rows: int) -> Workspace:
        """Scratch for products of one shape.

        Two of them may run at once on two streams of a captured pass, which is right as long as no
        tiles split the sum: only split sums use it.
        """
        return self._workspaces[shape, row_tile(num_rows)]

    def takes(self, x: torch.Tensor) -> bool:
        """Whether rows are as the kernels take them."""
        return (
            x.ndim == 2
            and 1 <= x.shape[0] <= MAX_ROWS
            and x.dtype == torch.bfloat16
            and x.stride(1) == 1
        )

    def _collect(self, model: torch.nn.Module) -> None:
        plain = list(compat.plain_projections(model))
        known = {id(module) for module in plain}
        paired: set[int] = set()
        for first, second in compat.projections_of_same_input(model):
            if not {id(first), id(second)} <= known:
                continue
            outputs, inputs = first.weight.shape
            shape = (outputs, second.weight.shape[0], inputs)
            if second.weight.shape[1] == inputs and self._reserve(shape):
                product = _FirstOfPair(self, first, second, shape)
                self._products += [(first, product), (second, _SecondOfPair(product))]
                paired |= {id(first), id(second)}
        for module in plain:
            outputs, inputs = module.weight.shape
            if id(module) not in paired and self._reserve((outputs, 0, inputs)):
                always = id(module) in self.outside
                product = _Single(self, module, (outputs, 0, inputs), always)
                self._products.append((module, product))

    def _reserve(self, shape: Shape) -> bool:
        """Count a layer and make its scratch; False without any tiles."""
        outputs, beside, _ = shape
        found = {rows: tiles for rows in ROW_TILES if (tiles := self.tiles(shape, rows))}
        for rows, tiles in found.items():
            if (shape, rows) not in self._workspaces:
                made = Workspace.create(tiles, rows, outputs + beside, self.device)
                self._workspaces[shape, rows] = made
        self.layers[shape] += bool(found)
        if not found:
            del self.layers[shape]
        return bool(found)


class _Single:
    """Product of one projection."""

    def __init__(self, owner: BlockProjections, module: Any, shape: Shape, always: bool) -> None:
        self.owner, self.module, self.shape, self.always = owner, module, shape, always

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        owner = self.owner
        # The scope comes first: outside of it compilers that trace a pass see no more than this.
        if not (self.always or owner.scope.active) or not owner.takes(x):
            return None
        tiles = owner.tiles(self.shape, x.shape[0])
        if tiles is None:
            return None
        workspace = owner.workspace(self.shape, x.shape[0])
        return skinny_linear(
            x,
            self.module.weight,
            tiles,
            workspace=workspace,
        )


class _FirstOfPair:
    """Product of the first of two projections of one input; computes the second one's too."""

    def __init__(self, owner: BlockProjections, first: Any, second: Any, shape: Shape) -> None:
        self.owner, self.first, self.second, self.shape = owner, first, second, shape
        # Input and the second one's output, until that is asked for.
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        owner = self.owner
        if not owner.scope.active or not owner.takes(x):
            return None
        tiles = owner.tiles(self.shape, x.shape[0])
        if tiles is None:
            return None
        out, out2 = skinny_linear_pair(
            x,
            self.first.weight,
            self.second.weight,
            tiles,
            workspace=owner.workspace(self.shape, x.shape[0]),
        )
        self.kept = x, out2
        return out


class _SecondOfPair:
    """Product of the second one: there already, if the first one saw this very tensor just now."""

    def __init__(self, first: _FirstOfPair) -> None:
        self.first = first

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        if not self.first.owner.scope.active:
            return None
        kept, self.first.kept = self.first.kept, None
        return kept[1] if kept is not None and kept[0] is x else None


def install_projections(
    model: torch.nn.Module, scope: VerifyScope, device: torch.device
) -> BlockProjections:
    """Replace the products of a target's projections, in its verify passes."""
    return _installed(BlockProjections(model, scope, device), "the target")


def install_drafter_projections(model: torch.nn.Module, device: torch.device) -> BlockProjections:
    """Those of a DFLASH drafter, whose blocks run as a verification does.

    Features of verified rows are projected after the round, outside of the drafter's pass; so are
    those of a prompt's last rows where they are few.
    """
    scope = VerifyScope()
    outside = compat.projections_outside_of_passes(model)
    projections = _installed(BlockProjections(model, scope, device, outside=outside), "the drafter")
    if projections.layers:
        scope.watch(model)
    return projections


def _installed(projections: BlockProjections, whose: str) -> BlockProjections:
    projections.install()
    if projections.device.type == "cuda":
        projections.compile()
    logger.info(
        "HYBRIDSPEC projections of %s in blocks of rows: %s.", whose, projections.sentence()
    )
    return projections
