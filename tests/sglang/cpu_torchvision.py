"""Makes torchvision importable beside a CPU build of torch, for SGLang's modules import it.

The wheels of torchvision are linked to CUDA. Beside torch without CUDA their C++ operators stay
unloaded, and the import stops at the first Python registration for one of them. Declared operators
are enough to get past it; no contract test calls them.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys

import torch

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
declared: list[torch.library.Library] = []


def make_importable() -> None:
    """Import torchvision, declaring the operators that its wheel could not load."""
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + BOXES)
        declared.append(library)  # a library that is collected takes its operators along
        import torchvision  # noqa: F401


make_importable()
