"""The fuzzer on the captured engine: fp32, kernels in the interpreter, a tiny pair.

Few rounds, because interpreted launches are slow; on a GPU `benchmarks/fuzz_gpu.py` plays many.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_fault_kit import GPU_FAULTS, GpuFault

from hybridspec.errors import EngineRefusal
from hybridspec.fuzz.gpu_adapter import GpuAdapter
from hybridspec.fuzz.noise import Noise, measure_noise
from hybridspec.fuzz.operations import History, Join, Leave, Plan, Step
from hybridspec.fuzz.play import Tally, play
from hybridspec.reference.gpu.target import MakeGdn
from hybridspec.reference.random_pair import PairShape, write_random_pair

SHAPE = PairShape(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    full_attention_interval=2,
    num_heads=1,
    head_dim=16,
    gdn_value_heads=1,
    num_experts=4,
    # No token changes its experts because of rounding.
    experts_per_token=4,
    expert_width=16,
    shared_width=16,
    drafter_heads=1,
    drafter_head_dim=16,
    drafter_mlp_width=32,
    target_layer_ids=(0,),
    tied_embeddings=False,
)
MIXED: History = (
    Join(0, (5, 9, 3)),
    Join(1, (7, 8), temperature=1.0, seed=4),
    Join(2, (1,)),  # no slot is left
    Step({1: Plan(0)}),
    Step({0: Plan(5, 2)}),
    Step({0: Plan(3, 1, 2)}),
    Leave(1, aborted=True),
    Join(3, (4,)),
    Step({3: Plan(0), 0: Plan(0)}),
)
SHORT: History = (
    Join(0, (5, 9, 3)),
    Step({0: Plan(4, 1)}),
    Step({0: Plan(0)}),
    Step({0: Plan(0)}),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_random_pair(tmp_path_factory.mktemp("captured"), SHAPE, seed=3)


def adapter_of(
    folders: tuple[Path, Path], noise: Noise | None = None, make_gdn: MakeGdn | None = None
) -> GpuAdapter:
    return GpuAdapter(
        *folders,
        device="cpu",
        dtype=torch.float32,
        max_requests=2,
        max_context=64,
        control_tokens=2,
        noise=noise,
        make_gdn=make_gdn,
    )


@pytest.fixture(scope="module")
def noise(folders: tuple[Path, Path]) -> Noise:
    return adapter_of(folders).noise


def test_plain_decoding_is_what_all_kinds_of_rounds_leave(
    folders: tuple[Path, Path], noise: Noise
) -> None:
    tally = Tally()
    assert play(adapter_of(folders, noise), MIXED, tally) is None
    counts = tally.counts
    assert counts["rounds"] == 4
    assert counts["joins"] == 3
    assert counts["request_rounds_without_drafts"] == 3
    assert counts["request_rounds_cut_at_first_router"] == 1
    assert set(tally.worst) == set(noise.tolerance)
    for part in ("conv_window", "recurrent_state"):
        assert noise.signal[part] > 1e3 * noise.tolerance[part]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if number == 0 else pytest.mark.slow, id=fault.name)
        for number, fault in enumerate(GPU_FAULTS)
    ],
)
def test_planted_fault_is_found(folders: tuple[Path, Path], noise: Noise, fault: GpuFault) -> None:
    violation = play(adapter_of(folders, noise, fault.make_gdn), SHORT)
    assert violation is not None
    assert violation.kind in fault.kinds


@pytest.mark.slow
def test_rounding_that_could_hide_a_fault_is_refused(
    folders: tuple[Path, Path], noise: Noise
) -> None:
    with pytest.raises(EngineRefusal, match="could hide"):
        measure_noise(adapter_of(folders, noise), layers=2, unit_roundoff=1.0, tokens=2)
