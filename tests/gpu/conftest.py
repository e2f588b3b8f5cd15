"""Tests that only a real GPU can answer."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
