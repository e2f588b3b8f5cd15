"""Safetensors of one Hugging Face folder, sharded or not, read tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hybridspec.errors import ModelError
from hybridspec.reference.config import read_json


class Checkpoint:
    """Named tensors of a model folder.

    Args:
        folder: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
        device: where tensors are placed.

    Raises:
        ModelError: no safetensors, a shard missing or truncated.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self._files: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        if (folder / "model.safetensors.index.json").is_file():
            weight_map = read_json(folder, "model.safetensors.index.json").get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{folder} has an index without weight_map: download it again")
            for name, file in weight_map.items():
                if Path(str(file)).name != file:
                    raise ModelError(f"{folder} index names {file!r}; plain file names only")
                self._files[name] = folder / file
            for path in sorted(set(self._files.values())):
                self._handle(path)
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                raise ModelError(
                    f"{folder} has no *.safetensors: download the weights, or convert them"
                )
            for path in paths:
                for name in self._handle(path).keys():  # noqa: SIM118 - not a mapping
                    self._files[name] = path

    def _handle(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                handle = safe_open(path, framework="pt", device=str(self.device))
                self._open[path] = handle
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} cannot be read as safetensors ({error}): it is missing or truncated; "
                    "download it again"
                ) from error
        return self._open[path]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._files)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor, check its shape and convert it.

        Raises:
            ModelError: missing, unreadable, of another shape, or with NaN or infinite values.
        """
        if name not in self._files:
            raise ModelError(
                f"{self.folder} lacks the tensor {name}; config.json asks for it: the folder is "
                "incomplete or of another model"
            )
        try:
            value = self._handle(self._files[name]).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{self._files[name]} does not hold {name} ({error}): download it again"
            ) from error
        if tuple(value.shape) != shape:
            raise ModelError(
                f"{self.folder} has {name} of shape {tuple(value.shape)}; config.json asks for "
                f"{shape}: weights and config are of different models"
            )
        if not value.is_floating_point():
            raise ModelError(
                f"{self.folder} has {name} as {value.dtype}; bf16, fp16 or fp32 needed"
            )
        if not bool(torch.isfinite(value).all()):
            raise ModelError(f"{self.folder} has NaN or infinite values in {name}: download again")
        return value.to(dtype)
