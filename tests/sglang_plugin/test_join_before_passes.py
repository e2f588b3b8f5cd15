"""A pass of the drafter waits for the append: its graph alone, or all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.compat.sglang_0_5_16_between_graphs import join_before_passes


class Runner:
    """The order of a model runner of SGLang: copies, then the graph; or everything at once."""

    def __init__(self, log: list[str], *, graphs: bool = True) -> None:
        self.log = log
        self.decode_cuda_graph_runner: Any = self.graphs() if graphs else None

    def graphs(self) -> Any:
        return SimpleNamespace(
            backend=SimpleNamespace(replay=lambda key: self.log.append(f"graph {key}")),
            can_run_graph=lambda batch: batch.size <= 4,
        )

    def forward(self, batch: Any, extra: int = 0) -> int:
        graphs = self.decode_cuda_graph_runner
        if (
            graphs is not None
            and batch.forward_mode.is_cuda_graph()
            and graphs.can_run_graph(batch)
        ):
            self.log.append("copies")
            graphs.backend.replay(batch.size)
        else:
            self.log.append("eager")
        return extra


def batch(size: int, captured: bool = True) -> Any:
    return SimpleNamespace(size=size, forward_mode=SimpleNamespace(is_cuda_graph=lambda: captured))


def joined(*, graphs: bool = True) -> tuple[Runner, list[str]]:
    log: list[str] = []
    runner = Runner(log, graphs=graphs)
    side: Any = SimpleNamespace(join=lambda: log.append("join"))
    join_before_passes(runner, side)
    return runner, log


def test_graph_alone_waits() -> None:
    runner, log = joined()
    assert runner.forward(batch(2), extra=5) == 5
    assert log == ["copies", "join", "graph 2"]


@pytest.mark.parametrize(("size", "captured"), [(5, True), (2, False)])
def test_pass_without_a_graph_waits(size: int, captured: bool) -> None:
    runner, log = joined()
    runner.forward(batch(size, captured))
    assert log == ["join", "eager"]


def test_runner_without_graphs_waits() -> None:
    runner, log = joined(graphs=False)
    runner.forward(batch(1))
    assert log == ["join", "eager"]


@pytest.mark.parametrize("part", ["runner", "backend"])
def test_graphs_made_anew_wait(part: str) -> None:
    runner, log = joined()
    if part == "runner":
        runner.decode_cuda_graph_runner = runner.graphs()
    else:
        runner.decode_cuda_graph_runner.backend = runner.graphs().backend
    runner.forward(batch(1))
    assert log == ["join", "copies", "graph 1"]
