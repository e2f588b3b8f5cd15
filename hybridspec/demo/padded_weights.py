"""Tensors of a padded pair, one at a time: read, place the source's values, fill the rest.

Three rules cover every matrix. A *reader* of the residual stream has the source's weights, divided
by the first copy's scale, on the first copy, and zeros on the others. A *writer* has them times s_i
on copy i and zeros everywhere else, so what is added writes nothing. A *norm* has them on each
copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hybridspec.demo.padded_noise import Noise
from hybridspec.demo.padded_shape import Padding
from hybridspec.errors import ModelError
from hybridspec.reference.checkpoint import Checkpoint

# Value of the constant dimension. Its square, 2.3e-10, is the only thing that norms see of it: less
# than fp32 resolves beside the sum of squares of any token.
CONSTANT = 2.0**-16
# Factor of the final norm there, and the LM head's weight there in padded rows: their logits are
# -2^18 divided by the root mean square of the residual stream.
CONSTANT_GAIN = 256.0
PADDED_ROW = -(2.0**26)
KEPT_IN_FP32 = ("A_log", "linear_attn.norm.weight")


@dataclass(frozen=True)
class Recipe:
    """One tensor of a padded checkpoint.

    Attributes:
        make: builds it, [shape] in `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class PaddedWeights:
    """Tensors of one padded folder, by name or in order; nothing is kept.

    Has the three methods that engines call on a `Checkpoint`, so that weights can be made on the
    card while a model is built.
    """

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        self.recipes = {recipe.name: recipe for recipe in recipes}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(recipe.num_bytes for recipe in self.recipes.values())

    def __contains__(self, name: str) -> bool:
        return name in self.recipes

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of layers."""
        return tuple(self.recipes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of layers."""
        for name, recipe in self.recipes.items():
            yield name, recipe.make()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make one tensor.

        Raises:
            ModelError: no such tensor, or of another shape.
        """
        recipe = self.recipes.get(name)
        if recipe is None or recipe.shape != tuple(shape):
            have = "no such tensor" if recipe is None else f"one of shape {recipe.shape}"
            raise ModelError(
                f"the padded pair has {have} for {name} {tuple(shape)}: use the config.json that "
                "was made with it"
            )
        return recipe.make().to(dtype)


class Padder:
    """Places tensors of a source folder in larger ones.

    Args:
        source: the folder's tensors; its device is where padded ones are made.
        label: distinguishes the noise of target and drafter.
        source_hidden, hidden: width of the residual stream before and after.
        dtype: of the padded tensors, but for those that stay fp32.

    Raises:
        ModelError: (from the builders) a tensor that `dtype` cannot hold exactly.
    """

    def __init__(
        self,
        source: Checkpoint,
        noise: Noise,
        padding: Padding,
        *,
        label: str,
        source_hidden: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._source, self._noise, self.padding, self._label = source, noise, padding, label
        self.source_hidden, self.hidden, self.dtype = source_hidden, hidden, dtype
        self.copied = len(padding.copy_scales) * source_hidden

    def dtype_of(self, name: str) -> torch.dtype:
        """Stored type of a tensor."""
        return torch.float32 if name.endswith(KEPT_IN_FP32) else self.dtype

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of the source, in its padded type.

        Raises:
            ModelError: missing, of another shape, or rounded by the type.
        """
        wide = self._source.tensor(name, shape, torch.float32)
        value = wide.to(self.dtype_of(name))
        if not torch.equal(value.float(), wide):
            raise ModelError(
                f"{self._source.folder} has {name} with values that {value.dtype} rounds, so the "
                "padded pair would compute something else: use --dtype float32"
            )
        return value

    def filler(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Noise for a tensor of this name."""
        return self._noise(self._label + name, shape, self.dtype_of(name))

    def _full(self, name: str, shape: tuple[int, ...], value: float) -> torch.Tensor:
        device = self._source.device
        return torch.full(shape, value, dtype=self.dtype_of(name), device=device)

    def _indices(self, places: Sequence[int]) -> torch.Tensor:
        return torch.tensor(places, device=self._source.device)

    def copies(self) -> Iterator[tuple[slice, float]]:
        """Dimensions and scale of each copy of the residual stream."""
        for i, scale in enumerate(self.padding.copy_scales):
            yield slice(i * self.source_hidden, (i + 1) * self.source_hidden), scale

    def recipe(self, name: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> Recipe:
        """A recipe with the type that the name decides."""
        return Recipe(name, shape, self.dtype_of(name), make)

    def reader(
        self,
        name: str,
        shape: tuple[int, ...],
        source: str | None,
        places: Sequence[int],
        source_shape: tuple[int, ...] | None = None,
    ) -> Recipe:
        """Matrix [..., hidden] that reads the residual stream.

        Args:
            source: tensor whose rows are placed, None for nothing but noise.
            places: row of each of them, both matrices flattened to two dimensions.
            source_shape: [rows, source hidden] by default.
        """

        def make() -> torch.Tensor:
            out = self.filler(name, shape)
            if source is not None:
                value = self.read(source, *(source_shape or (len(places), self.source_hidden)))
                self.read_first_copy(
                    out.view(-1, self.hidden),
                    self._indices(places),
                    value.view(-1, self.source_hidden),
                )
            return out

        return self.recipe(name, shape, make)

    def read_first_copy(self, out: torch.Tensor, rows: torch.Tensor, value: torch.Tensor) -> None:
        """Let `rows` of out [N, hidden] read value [rows, source hidden] from the first copy."""
        out[rows, : self.copied] = 0
        out[rows, : self.source_hidden] = value / self.padding.copy_scales[0]
        if self.padding.constant_dim is not None:
            out[rows, self.padding.constant_dim] = 0

    def writer(
        self,
        name: str,
        shape: tuple[int, ...],
        source: str | None,
        source_shape: tuple[int, ...],
        places: Sequence[int],
    ) -> Recipe:
        """Matrix [..., hidden, width] that adds to the residual stream.

        Args:
            source: tensor of `source_shape` [..., source hidden, columns], None for one that adds
                nothing.
            places: column of each of its columns.
        """

        def make() -> torch.Tensor:
            out = self._full(name, shape, 0.0)
            if source is not None:
                value, columns = self.read(source, *source_shape), self._indices(places)
                for dims, scale in self.copies():
                    out[..., dims, :][..., columns] = value * scale
            return out

        return self.recipe(name, shape, make)

    def norm(self, name: str, source: str, *, neutral: float, gain: float | None = None) -> Recipe:
        """Norm over the residual stream.

        Args:
            neutral: stored weight that stands for a factor of one.
            gain: stored weight of the constant dimension, neutral by default.
        """

        def make() -> torch.Tensor:
            out = self._full(name, (self.hidden,), neutral)
            value = self.read(source, self.source_hidden)
            for dims, _ in self.copies():
                out[dims] = value
            if gain is not None and self.padding.constant_dim is not None:
                out[self.padding.constant_dim] = gain
            return out

        return self.recipe(name, (self.hidden,), make)

    def placed(
        self,
        name: str,
        shape: tuple[int, ...],
        source: str | None,
        places: Sequence[int],
        *,
        fill: float | None,
    ) -> Recipe:
        """Tensor [size, ...] outside the residual stream.

        Args:
            fill: value of what is added, None for noise.
        """

        def make() -> torch.Tensor:
            out = self.filler(name, shape) if fill is None else self._full(name, shape, fill)
            if source is not None:
                out[self._indices(places)] = self.read(source, len(places), *shape[1:])
            return out

        return self.recipe(name, shape, make)


def spans(heads: Iterable[int], width: int) -> list[int]:
    """Rows of heads that are `width` rows each."""
    return [head * width + i for head in heads for i in range(width)]
