"""The captured engine runs the length and the experts that a measurement forces on it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.errors import UsageError
from hybridspec.reference.config import load_drafter_config, load_target_config
from hybridspec.reference.gpu import measured
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.measured import EngineRound
from hybridspec.reference.gpu.weights import folder_tensors, load_drafter, load_target
from hybridspec.reference.random_pair import PairShape, write_random_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> GpuEngine:
    target, drafter = write_random_pair(tmp_path_factory.mktemp("pair"), PairShape(), seed=5)
    return GpuEngine(
        load_target(
            load_target_config(target),
            folder_tensors(target, DEVICE),
            dtype=torch.float32,
            device=DEVICE,
        ),
        load_drafter(
            load_drafter_config(drafter),
            folder_tensors(drafter, DEVICE),
            dtype=torch.float32,
            device=DEVICE,
        ),
        max_context=128,
    )


def test_forced_lengths_and_routes(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "TEXT_TOKENS", 16)
    with pytest.raises(UsageError, match="0 tokens"):
        EngineRound(engine, [[]])
    placed = EngineRound(engine, [list(range(10, 60))])
    keys = engine.target.keys_XBCGD
    torch.testing.assert_close(keys[:, :, 48:64], keys[:, :, :16], rtol=0.0, atol=0.0)

    placed.place(100)
    placed.force_length(3)
    placed.force_routes(5, length=3)
    state = engine.target.gdn.state_XSHVK.clone()
    placed.forced.prefix()
    placed.forced.rest(16)
    assert placed.rows_run() == 3
    assert placed.distinct_experts_run() == {5}
    assert engine.target.forced_XRK is None, "other rounds route as the routers say"
    assert int(engine.target.starts_B) > 100
    assert not torch.equal(engine.target.gdn.state_XSHVK, state)
    placed.restore()
    assert int(engine.target.starts_B) == 100
    assert torch.equal(engine.target.gdn.state_XSHVK, state)

    placed.plain()
    assert placed.rows_run() == 1
    for wrong in (1, 7):
        with pytest.raises(UsageError, match="distinct experts"):
            placed.force_routes(wrong, length=3)
