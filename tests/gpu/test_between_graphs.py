"""Launches between the graphs of a round on the card: the bits of what they replace, and times."""

# SGLang is there on some machines with a GPU.
# pyright: reportMissingImports=false

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from hybridspec.kernels.accept.argmax import ArgmaxScratch, argmax_of_blocks
from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.kv_append.append import Caches, append
from hybridspec.sglang_plugin.commit_graphs import CommitGraphs
from hybridspec.sglang_plugin.side_stream import SideStream

pytestmark = pytest.mark.gpu
VOCAB = 248_320


def microseconds(call: Callable[[], object], repeats: int = 40) -> float:
    """Median of the device's time for a call, queued ahead."""
    times = []
    for _ in range(repeats):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) * 1e3)
    return statistics.median(times)


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
def test_argmax_is_torchs(kind: str, requests: int, cuda: torch.device) -> None:
    torch.manual_seed(requests)
    logits = torch.randn(16 * requests, VOCAB, device=cuda)
    if kind == "ties":
        logits = logits.mul(4).round()
    elif kind == "nan":
        logits[torch.rand_like(logits) < 1e-5] = float("nan")
    lengths = torch.randint(1, 17, (requests,), dtype=torch.int32, device=cuda)
    scratch = ArgmaxScratch.create(requests, cuda)
    rows = torch.arange(16, device=cuda) < lengths[:, None]
    expected = torch.argmax(logits, -1) * rows.view(-1)
    for _ in range(20):
        assert torch.equal(argmax_of_blocks(logits, lengths, scratch), expected)


def test_time_of_argmax(cuda: torch.device) -> None:
    logits = torch.randn(16, VOCAB, device=cuda)
    out = torch.empty(16, dtype=torch.int64, device=cuda)
    scratch = ArgmaxScratch.create(1, cuda)
    print(f"\ntorch.argmax, 16 rows: {microseconds(lambda: torch.argmax(logits, -1)):.1f} us")
    for length in (1, 4, 8, 16):
        lengths = torch.full((1,), length, dtype=torch.int32, device=cuda)
        argmax_of_blocks(logits, lengths, scratch, out=out)
        took = microseconds(lambda: argmax_of_blocks(logits, lengths, scratch, out=out))  # noqa: B023
        print(f"argmax_of_blocks, length {length}: {took:.1f} us")


@pytest.mark.parametrize("commit_rows", [[1], [16], [4, 0, 9]], ids=str)
def test_append_is_sglangs(commit_rows: list[int], cuda: torch.device) -> None:
    pool_module = pytest.importorskip("sglang.srt.mem_cache.memory_pool")
    layers, heads, dim, blocks = 8, 8, 128, len(commit_rows)
    keys, values = (
        torch.randn(layers, 64, heads, dim, device=cuda).bfloat16()[:, : blocks * 16]
        for _ in range(2)
    )
    places = torch.randperm(500, device=cuda)[: blocks * 16].view(blocks, 16)
    rows = torch.tensor(commit_rows, dtype=torch.int32, device=cuda)
    stock, ours = (
        [torch.full((500, heads, dim), 7.0, device=cuda).bfloat16() for _ in range(2 * layers)]
        for _ in range(2)
    )

    def write_stock() -> None:
        for layer in range(layers):
            pool_module._set_kv_buffer_prefix_valid_impl(
                keys[layer],
                values[layer],
                stock[layer],
                stock[layers + layer],
                places,
                rows,
                row_dim=heads * dim,
                store_dtype=torch.bfloat16,
            )

    caches = Caches.of(ours[:layers], ours[layers:])
    write_stock()
    append(keys, values, caches, places, rows)
    for one, other in zip(stock, ours, strict=True):
        assert torch.equal(one, other)
    took = microseconds(lambda: append(keys, values, caches, places, rows))
    print(f"\n{commit_rows}: {microseconds(write_stock):.1f} us by layer, {took:.1f} us at once")


class States:
    """Pools and factors at the shape of Qwen3.6-35B-A3B."""

    def __init__(self, requests: int, device: torch.device) -> None:
        layers, heads, channels, slots = 30, 32, 8192, requests + 1
        self.state_XSHVK = torch.randn(layers, slots, heads, 128, 128, device=device)
        self.factors = Factors.allocate(layers, requests, 16, heads, 128, 128, device=device)
        self.factors.key_XRHTK.normal_()
        self.factors.update_XRHTV.normal_(std=0.05)
        self.factors.decay_XRHT.uniform_(-0.1, 0.0)
        raw = torch.randn(layers, requests, 16, channels, device=device).bfloat16()
        pool = torch.randn(layers, slots, channels, 3, device=device).bfloat16()
        self.windows = ConvWindows(pool, raw)
        self.rows = torch.full((requests,), 3, dtype=torch.int32, device=device)
        self.slots = torch.arange(1, requests + 1, dtype=torch.int32, device=device)

    def commit(self) -> None:
        commit(self.state_XSHVK, self.slots, self.rows, self.factors, windows=self.windows)


@pytest.mark.parametrize("requests", [1, 4])
def test_time_of_a_commit_beside_other_work(requests: int, cuda: torch.device) -> None:
    """In line; beside in one launch; beside in slices. The main stream has what a round has."""
    torch.manual_seed(0)
    whole = States(requests, cuda)
    side = SideStream(cuda)
    assert side.stream is not None
    graphs = CommitGraphs(whole, whole.rows, whole.slots, (requests,), side.stream)
    features = torch.randn(16 * requests, 10_240, device=cuda).bfloat16()
    fc = torch.randn(10_240, 2048, device=cuda).bfloat16()
    to_caches = torch.randn(2048, 16_384, device=cuda).bfloat16()
    small = torch.zeros(64, device=cuda)
    layer = torch.randn(2048, 6144, device=cuda).bfloat16()

    def rest() -> None:
        hidden = features @ fc
        torch.matmul(hidden, to_caches)
        for _ in range(15):
            small.add_(1.0)
        # The first layers of the drafter.
        for _ in range(20):
            torch.matmul(hidden, layer)
            small.add_(1.0)

    def in_line() -> None:
        whole.commit()
        rest()

    def beside(launch: Callable[[], None]) -> None:
        with side.beside():
            launch()
        rest()
        side.join()

    print(f"\n{requests} requests: rest {microseconds(rest):.1f} us", end=", ")
    print(f"commit {microseconds(whole.commit):.1f} us", end=", ")
    print(f"in line {microseconds(in_line):.1f} us", end=", ")
    print(f"beside, one launch {microseconds(lambda: beside(whole.commit)):.1f} us", end=", ")
    slices = microseconds(lambda: beside(lambda: graphs.launch(requests)))
    print(f"beside, slices {slices:.1f} us")


def test_commit_in_slices_is_the_commit(cuda: torch.device) -> None:
    torch.manual_seed(1)
    one = States(3, cuda)
    torch.manual_seed(1)
    cut = States(3, cuda)
    side = SideStream(cuda)
    assert side.stream is not None
    rows, slots = cut.rows.clone(), cut.slots.clone()
    graphs = CommitGraphs(cut, rows, slots, (4, 3), side.stream)
    for turn in range(6):
        accepted = torch.tensor([turn, 16 - turn, 1], dtype=torch.int32, device=cuda)
        one.rows.copy_(accepted)
        one.slots[turn % 3] = -1 if turn == 4 else one.slots[turn % 3]
        slots.copy_(one.slots)
        one.commit()
        with side.beside(accepted):
            rows.copy_(accepted)
            graphs.launch(3)
        side.join()
        assert torch.equal(one.state_XSHVK, cut.state_XSHVK)
        assert torch.equal(one.windows.pool_XSCW, cut.windows.pool_XSCW)
