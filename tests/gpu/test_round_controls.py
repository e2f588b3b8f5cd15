"""The captured round of the engine under every control, and measured through the probe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybridspec.costmodels.sweep import measure_experts, measure_steps
from hybridspec.reference.config import load_drafter_config, load_target_config
from hybridspec.reference.gpu.control import CONTROL_NAMES, GraphControl, make_control
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.measured import EngineRound, longest_tables
from hybridspec.reference.gpu.profile import GpuProbe
from hybridspec.reference.gpu.round import RoundRules
from hybridspec.reference.gpu.weights import (
    DrafterWeights,
    TargetWeights,
    folder_tensors,
    load_drafter,
    load_target,
)
from hybridspec.reference.random_pair import PairShape, write_random_pair

pytestmark = pytest.mark.gpu

# As small as the kernels take.
SHAPE = PairShape(
    vocab_size=2048, hidden_size=512, num_heads=4, num_kv_heads=2, head_dim=64, gdn_key_heads=2,
    gdn_value_heads=4, gdn_key_dim=128, gdn_value_dim=128, num_experts=32, experts_per_token=8,
    expert_width=128, shared_width=128, drafter_heads=4, drafter_kv_heads=2, drafter_head_dim=64,
    drafter_mlp_width=256, max_position_embeddings=2048,
)  # fmt: skip
TEXTS = [list(range(10, 400)), list(range(900, 1500))]
CONTEXT = 700
LENGTHS = (1, 2, 3, 5, 8, 11, 16)
# bf16 products in another order: cuBLAS takes other kernels for other numbers of rows.
TOLERANCE = 3e-2


@pytest.fixture(scope="module")
def weights(
    cuda: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TargetWeights, DrafterWeights]:
    target, drafter = write_random_pair(tmp_path_factory.mktemp("pair"), SHAPE, seed=3)
    return (
        load_target(
            load_target_config(target),
            folder_tensors(target, cuda),
            dtype=torch.bfloat16,
            device=cuda,
        ),
        load_drafter(
            load_drafter_config(drafter),
            folder_tensors(drafter, cuda),
            dtype=torch.bfloat16,
            device=cuda,
        ),
    )


@pytest.fixture(scope="module")
def placed(weights: tuple[TargetWeights, DrafterWeights]) -> EngineRound:
    engine = GpuEngine(*weights, max_context=1024)
    rules = RoundRules("policy", longest_tables(engine.target.device), correction="select")
    found = EngineRound(engine, TEXTS, rules=rules)
    found.place(CONTEXT)
    return found


@pytest.fixture(scope="module")
def controls(placed: EngineRound) -> dict[str, GraphControl]:
    found = {}
    for name in CONTROL_NAMES:
        placed.restore()
        found[name] = make_control(name)
        found[name].capture(placed.drafted)
    return found


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def played(placed: EngineRound, control: GraphControl, length: int) -> dict[str, torch.Tensor]:
    """Everything that one round from the placed state leaves, outputs poisoned before."""
    target, report = placed.engine.target, placed.engine.buffers.report
    placed.force_length(length)
    placed.restore()
    target.logits_RV.fill_(float("nan"))
    report.emitted_BT.fill_(-7)
    control.replay()
    torch.cuda.synchronize()
    assert placed.rows_run() == length
    left = {
        "logits": target.logits_RV[:length],
        "emitted": report.emitted_BT,
        "starts": target.starts_B,
        "state": target.gdn.state_XSHVK,
        "windows": target.gdn.windows_XSCW,
    }
    return {name: value.clone() for name, value in left.items()}


def test_bodies_that_the_device_picks_are_those_that_the_host_picks(
    placed: EngineRound, controls: dict[str, GraphControl]
) -> None:
    for length in LENGTHS:
        host = played(placed, controls["host"], length)
        switch = played(placed, controls["switch"], length)
        assert host["logits"].isfinite().all()
        for name, value in host.items():
            assert torch.equal(switch[name], value), f"{name} at length {length}"


def test_masked_rounds_are_the_same_up_to_the_order_of_sums(
    placed: EngineRound, controls: dict[str, GraphControl]
) -> None:
    for length in LENGTHS:
        host = played(placed, controls["host"], length)["logits"].float()
        masked = played(placed, controls["masked"], length)["logits"].float()
        assert float((masked - host).norm() / host.norm()) < TOLERANCE, f"length {length}"


def test_masked_rows_do_not_depend_on_the_length(
    placed: EngineRound, controls: dict[str, GraphControl]
) -> None:
    full = played(placed, controls["masked"], 16)["logits"]
    for length in range(1, 16):
        found = played(placed, controls["masked"], length)["logits"]
        assert torch.equal(found, full[:length]), f"length {length}"


@pytest.mark.parametrize("name", ["masked", "switch"])
def test_a_round_does_not_make_the_host_wait(
    placed: EngineRound, controls: dict[str, GraphControl], name: str
) -> None:
    placed.force_length(6)
    placed.restore()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            controls[name].replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waited = busy.query()
    torch.cuda.synchronize()
    placed.restore()
    assert not waited, "five launches took longer than the device was busy"


def test_the_probe_measures_what_is_asked(weights: tuple[TargetWeights, DrafterWeights]) -> None:
    probe = GpuProbe(
        lambda batch: EngineRound(GpuEngine(*weights, batch=batch, max_context=1024), TEXTS),
        lambda: make_control("masked"),
        max_batch=2,
        identity={},
    )
    steps = measure_steps(
        probe,
        batch_sizes=[1, 2],
        context_tokens=[100, 900],
        lengths=(0, 1, 7, 16),
        repeats=5,
        budget_s=120,
    )
    assert steps.num_rows == 2 * 2 * 4 * 5
    experts = measure_experts(
        probe, verify_lengths=(2, 8), points=3, context_tokens=100, repeats=5, budget_s=60
    )
    assert set(experts.column("distinct_experts").to_pylist()) == {8, 12, 16, 20, 32}
