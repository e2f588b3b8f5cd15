"""SGLang loads a padded pair without weight files: tensors are made on the card while it loads.

    python -m hybridspec.demo.inflate PAIR --out PADDED --no-weights
    HYBRIDSPEC_PADDED_SOURCE=PAIR python -m sglang.launch_server --model-path PADDED/target ...

Full size is 69 GB that no disk has to hold. Works for target and drafter, in every scheduler
process; with tensor parallelism each makes whole tensors and SGLang's weight loaders keep their
shard. The folder's config names the source pair by digest: another one is refused.
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridspec.errors import ModelError

if TYPE_CHECKING:
    import torch

SOURCE_ENV = "HYBRIDSPEC_PADDED_SOURCE"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
_MARK = "_hybridspec_padded_weights"
logger = logging.getLogger(__name__)


def is_weightless(folder: Path) -> bool:
    """Whether `folder` is a part of a padded pair that was written without its weights."""
    from hybridspec.demo.padded_config import KEY
    from hybridspec.reference.config import read_json

    if not (folder / "config.json").is_file():
        return False
    if any(path.suffix in _WEIGHT_SUFFIXES for path in folder.iterdir()):
        return False
    return KEY in read_json(folder, "config.json")


def make_weights(
    folder: Path, source: Path, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs that a checkpoint in `folder` would hold.

    Args:
        folder: target/ or drafter/ of a padded pair.
        source: the pair that it was made from.
        device: where tensors are made.

    Raises:
        ModelError: `source` is another pair than the config of `folder` names, or cannot be padded
            to its shape.
    """
    import torch

    from hybridspec.artifacts.digest import model_digest
    from hybridspec.demo.padded_config import KEY
    from hybridspec.demo.padded_pair import PaddedPair
    from hybridspec.demo.padded_shape import PaddedShape
    from hybridspec.reference.config import read_json

    config = read_json(folder, "config.json")
    record = config[KEY]
    pair = PaddedPair.open(
        source,
        PaddedShape(**record["shape"]),
        dtype=getattr(torch, str(config["dtype"])),
        device=device,
    )
    for part in ("target", "drafter"):
        found = model_digest(source / part)
        wanted = record["source"][f"{part}_sha256"]
        if found != wanted:
            raise ModelError(
                f"{source / part} has digest {found}; {folder} was made from {wanted}: set "
                f"{SOURCE_ENV} to that pair, or run hybridspec.demo.inflate again"
            )
    is_drafter = "dflash_config" in config
    yield from pair.drafter_weights() if is_drafter else pair.target_weights()


def install() -> None:
    """Entry point of SGLang's plugins: nothing changes unless `HYBRIDSPEC_PADDED_SOURCE` is set."""
    if not os.environ.get(SOURCE_ENV):
        return
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if getattr(DefaultModelLoader, _MARK, False):
        return
    from_files: Callable[..., Any] = DefaultModelLoader._get_weights_iterator

    def get_weights_iterator(self: Any, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        folder = Path(source.model_or_path)
        if not is_weightless(folder):
            return from_files(self, source)
        made = _logged(folder, Path(os.environ[SOURCE_ENV]))
        return ((source.prefix + name, tensor) for name, tensor in made)

    DefaultModelLoader._get_weights_iterator = get_weights_iterator
    setattr(DefaultModelLoader, _MARK, True)


def _logged(folder: Path, source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    began, count, num_bytes = time.perf_counter(), 0, 0
    for name, tensor in make_weights(folder, source, device):
        count, num_bytes = count + 1, num_bytes + tensor.nbytes
        yield name, tensor
    if on_gpu:
        # What the last tensors were made in would be missing from the KV pool.
        torch.cuda.empty_cache()
    logger.info(
        "%s: %d tensors, %.2f GB, made on %s from %s in %.1f s",
        folder, count, num_bytes / 1e9, device, source, time.perf_counter() - began,
    )  # fmt: skip
