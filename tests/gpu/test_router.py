"""Fused router against SGLang's own, bit for bit; graphs; blocks of experts on two streams."""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridspec.kernels.route_mask.route_mask import route_mask
from hybridspec.kernels.router import naive
from hybridspec.kernels.router.gate import gate
from hybridspec.kernels.router.router import router

pytestmark = pytest.mark.gpu

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
Stock = Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
LAYERS = 40


@pytest.fixture(scope="module")
def stock(cuda: torch.device) -> Stock:
    """Weights and ids as `fused_topk` of SGLang gets them on CUDA."""
    try:
        from sglang.jit_kernel.moe_fused_gate import moe_fused_gate
    except Exception as error:
        pytest.skip(f"SGLang cannot be imported here: {type(error).__name__}: {error}")

    def call(logits: torch.Tensor, top_k: int, renormalize: bool) -> Any:
        bias = torch.zeros(logits.shape[1], dtype=torch.float32, device=cuda)
        weights, ids = moe_fused_gate(
            logits, bias, top_k, scoring_func="softmax", renormalize=renormalize
        )
        return ids, weights

    return call


def random_logits(
    rows: int, experts: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Of a spread that differs between rows, ties among them."""
    device = generator.device
    values = torch.randn(rows, experts, generator=generator, device=device)
    spread = torch.rand(rows, 1, generator=generator, device=device) * 6
    values = values * spread
    values[::5] = values[::5].round()
    return values.to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("experts", "top_k", "renormalize"),
    [
        (256, 8, True),
        (256, 8, False),
        (512, 10, True),
        (128, 8, True),
        (200, 6, True),
        (60, 4, False),
    ],
)
def test_bits_of_sglang(
    cuda: torch.device,
    stock: Stock,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    renormalize: bool,
) -> None:
    generator = torch.Generator(cuda).manual_seed(experts + top_k)
    for rows in (1, 2, 3, 5, 8, 13, 16, 31, 32, 64, 100, 128):
        for _ in range(40 if experts == 256 else 8):
            logits = random_logits(rows, experts, dtype, generator)
            wanted = stock(logits, top_k, renormalize)
            for dependent in (None, False):
                ids, weights = router(logits, top_k, renormalize=renormalize, dependent=dependent)
                assert torch.equal(ids, wanted[0])
                assert same_bits(weights, wanted[1])


@pytest.mark.parametrize("mode", ["alias", "drop"])
@pytest.mark.parametrize("lengths", [[4], [16, 1], [0, 7, 16, 2], [0, 0], [1] * 8])
def test_masked_is_sglang_then_mask(
    cuda: torch.device, stock: Stock, lengths: list[int], mode: Any
) -> None:
    generator = torch.Generator(cuda).manual_seed(len(lengths))
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=cuda)
    for _ in range(20):
        logits = random_logits(16 * len(lengths), 256, torch.bfloat16, generator)
        kept = torch.full((len(logits), 8), -777, dtype=torch.int32, device=cuda)
        unmasked, weights = stock(logits, 8, True)
        ids = unmasked.clone()
        route_mask(ids, weights, lengths_B, mode=mode)
        found = router(logits, 8, lengths_B=lengths_B, mode=mode, kept_RK=kept)
        assert torch.equal(found[0], ids)
        assert same_bits(found[1], weights)
        assert torch.equal(kept, unmasked)


def test_rows_that_are_not_finite_are_sglangs(cuda: torch.device, stock: Stock) -> None:
    generator = torch.Generator(cuda).manual_seed(9)
    logits = random_logits(16, 256, torch.bfloat16, generator)
    logits[1, 5], logits[2, 200] = float("nan"), float("inf")
    logits[3, 20:], logits[4] = float("-inf"), float("nan")
    wanted, found = stock(logits, 8, True), router(logits, 8)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1].isnan(), wanted[1].isnan())
    assert torch.equal(found[1].nan_to_num(), wanted[1].nan_to_num())


def test_replays_behind_the_gates_product(cuda: torch.device) -> None:
    """A dependent launch waits for the product in front of it; lengths change between replays."""
    generator = torch.Generator(cuda).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=cuda).bfloat16()

    x, gates = random(32, 2048), random(LAYERS, 256, 2048) / 45
    lengths = torch.tensor([16, 16], dtype=torch.int32, device=cuda)
    ids = torch.empty(LAYERS, 32, 8, dtype=torch.int32, device=cuda)
    weights = torch.empty(LAYERS, 32, 8, device=cuda)
    logits = torch.empty(LAYERS, 32, 256, dtype=torch.bfloat16, device=cuda)

    def work() -> None:
        for i in range(LAYERS):
            torch.mm(x, gates[i].T, out=logits[i])
            router(logits[i], 8, lengths_B=lengths, out=(ids[i], weights[i]))

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for turn in range(20):
        x.copy_(random(32, 2048))
        lengths.copy_(torch.tensor([turn % 17, (5 * turn) % 17], dtype=torch.int32))
        logits.fill_(float("nan"))
        ids.fill_(-777)
        weights.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for i in range(LAYERS):
            wanted = naive.router(logits[i].double(), 8, lengths_B=lengths)
            assert torch.equal(ids[i], wanted[0])
            assert float((weights[i] - wanted[1]).abs().max()) < 2e-6


def test_gate_in_parts_is_as_close_as_the_librarys(cuda: torch.device) -> None:
    """Logits differ from the exact ones rounded no more often, and by no more than one step."""
    generator = torch.Generator(cuda).manual_seed(2)
    wrong = {"ours": 0, "library": 0}
    for _ in range(20):
        x = torch.randn(16, 2048, generator=generator, device=cuda).bfloat16()
        weight = torch.randn(256, 2048, generator=generator, device=cuda).mul_(0.02).bfloat16()
        exact = (x.double() @ weight.double().T).bfloat16()
        parts = gate(x, weight)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        found = {"ours": total.bfloat16(), "library": x @ weight.T}
        for name, logits in found.items():
            wrong[name] += int((logits != exact).sum())
            assert torch.allclose(logits.float(), exact.float(), rtol=2**-7, atol=1e-5)
        ids, weights = router(parts, 8)
        wanted = naive.router(found["ours"].double(), 8)
        assert torch.equal(ids, wanted[0])
        assert float((weights - wanted[1]).abs().max()) < 2e-6
        alone = gate(x[3:4].contiguous(), weight)
        assert torch.equal(alone[:, 0], parts[:, 3])
    print(f"logits of {20 * 16 * 256} that are not the exact ones rounded: {wrong}")
    assert wrong["ours"] <= 2 * wrong["library"] + 20


def test_gate_and_router_wait_for_what_is_ahead(cuda: torch.device) -> None:
    """A chain of dependent launches behind the kernel that writes their input."""
    generator = torch.Generator(cuda).manual_seed(3)
    gates = torch.randn(LAYERS, 256, 2048, generator=generator, device=cuda).mul_(0.02).bfloat16()
    source = torch.empty(LAYERS, 16, 2048, dtype=torch.bfloat16, device=cuda)
    x = torch.empty_like(source)
    partials = torch.empty(8, 16, 256, device=cuda)
    lengths = torch.tensor([16], dtype=torch.int32, device=cuda)
    ids = torch.empty(LAYERS, 16, 8, dtype=torch.int32, device=cuda)
    weights = torch.empty(LAYERS, 16, 8, device=cuda)

    def work() -> None:
        for i in range(LAYERS):
            torch.mul(source[i], 2, out=x[i])
            parts = gate(x[i], gates[i], out=partials)
            router(parts, 8, lengths_B=lengths, out=(ids[i], weights[i]))

    source.normal_()
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for turn in range(20):
        source.normal_()
        lengths.fill_(turn % 17)
        for tensor in (x, weights, partials):
            tensor.fill_(float("nan"))
        ids.fill_(-777)
        graph.replay()
        torch.cuda.synchronize()
        for i in range(LAYERS):
            parts = gate(source[i] * 2, gates[i], dependent=False)
            wanted = router(parts, 8, lengths_B=lengths, dependent=False)
            assert torch.equal(ids[i], wanted[0])
            assert same_bits(weights[i], wanted[1])


@pytest.mark.usefixtures("stock")
def test_block_with_its_gate_in_parts(cuda: torch.device) -> None:
    """Captured on two streams; rows that route alike come out alike, and nearly all do."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang_target.engine import expert_block

    from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
    from hybridspec.sglang_plugin.target.experts import RoutedExperts
    from hybridspec.sglang_plugin.target.launches import LaunchOptions
    from hybridspec.sglang_plugin.target.scope import VerifyScope

    x = torch.randn(16, 2048, device=cuda).bfloat16()
    results = []
    for fused in (True, False):
        state, scope = RoundState(1, cuda), VerifyScope()
        block = expert_block(cuda, seed=4)
        launches = LaunchOptions(small_moe=True, fused_gate=fused, keep_routes=True)
        half = RoutedExperts([block], scope, state, TargetOptions(), launches)
        half.install()
        state.lengths_B.fill_(16)
        with model_capture_mode(), scope.entered():
            block(x.clone())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = block(x)
        results.append((graph, out, half))
    alike, rows = 0, 0
    for _ in range(20):
        x.normal_()
        for graph, out, _ in results:
            out.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        kept = [half.kept_XRK[0, :16].sort(1).values for _, _, half in results]
        same = (kept[0] == kept[1]).all(1)
        outputs = [out[same].double() for _, out, _ in results]
        assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 1e-2
        alike, rows = alike + int(same.sum()), rows + 16
    print(f"rows with the same experts: {alike} of {rows}")
    assert alike > 0.9 * rows


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("small", [True, False], ids=["small_moe", "engine"])
@pytest.mark.parametrize("requests", [1, 4])
def test_captured_blocks_have_the_bits_of_the_launches_they_replace(
    cuda: torch.device, requests: int, small: bool
) -> None:
    """Fused router and our two streams against SGLang's router, our mask and SGLang's streams."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang_target.engine import expert_block

    from hybridspec.compat import sglang_0_5_16_target as compat
    from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
    from hybridspec.sglang_plugin.target.experts import RoutedExperts
    from hybridspec.sglang_plugin.target.launches import LaunchOptions
    from hybridspec.sglang_plugin.target.scope import VerifyScope

    state, scope = RoundState(4, cuda), VerifyScope()
    x = torch.randn(requests * 16, 2048, device=cuda).bfloat16()
    # A graph holds no tensor: weights and scratch of a half that is gone would be handed back to
    # the device when the next capture begins.
    graphs, outputs, kept = [], [], []
    for fused in (True, False):
        blocks = [expert_block(cuda, layer_id=i, seed=i) for i in range(3)]
        launches = LaunchOptions(small_moe=small, fused_router=fused, own_streams=fused)
        half = RoutedExperts(blocks, scope, state, TargetOptions(), launches)
        half.install()
        kept.append((blocks, half))
        assert compat.plain_router(blocks[0]) is not None
        for block in blocks:
            assert ("forward_normal_dual_stream" in vars(block)) == (small and fused)

        def run(blocks: list[Any] = blocks) -> torch.Tensor:
            with scope.entered():
                y = x
                for block in blocks:
                    y = y + block(y.clone())
            return y

        state.lengths_B.fill_(16)
        with model_capture_mode():
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs.append(run())
        graphs.append(graph)
    for lengths in ([16] * 4, [4, 1, 0, 9], [1, 16, 3, 0], [7, 7, 7, 7]):
        x.normal_()
        state.lengths_B[:4].copy_(torch.tensor(lengths, dtype=torch.int32))
        for graph, out in zip(graphs, outputs, strict=True):
            out.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        assert bool(outputs[0].isfinite().all())
        assert torch.equal(outputs[0], outputs[1])
