"""GDN kernels on a GPU: full shape, graphs, dependent launches, long chains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gdn_cases import (
    BF16,
    FORMS,
    FP32,
    VARIANTS,
    Case,
    assert_accurate,
    assert_bits,
    head_errors,
    int32,
)
from gdn_chains import Chain, assert_no_drift
from gdn_kit import REGIMES, Inputs, make_inputs

from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.pending import Pending, advance, flush

pytestmark = pytest.mark.gpu

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
FULL: dict[str, Any] = {
    "key_heads": KEY_HEADS,
    "value_heads": VALUE_HEADS,
    "key_dim": DIM,
    "value_dim": DIM,
}
SHAPE = (KEY_HEADS, VALUE_HEADS, DIM, DIM)
LAYERS = 30


def dependent_launch_or_skip(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("dependent launch needs Hopper or later")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", range(1, 17))
def test_every_block_size(cuda, form, rows):
    lengths = [rows, 0, rows // 2, rows + 3]
    case = Case.make(cuda, rows, lengths, regime=REGIMES[rows % 5], out=BF16, seed=rows, **FULL)
    case.check(FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize(("value_block", "warps"), VARIANTS)
def test_variants(cuda, form, rows, state, value_block, warps):
    case = Case.make(cuda, rows, [rows, rows - 1], state=state, seed=rows, **FULL)
    case.check(FORMS[form], value_block=value_block, warps=warps)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", REGIMES)
def test_gate_regimes(cuda, form, regime):
    Case.make(cuda, 16, [16, 13, 7], regime=regime, **FULL).check(FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [4, 16])
def test_dependent_launch_gives_the_same_bits(cuda, form, rows):
    dependent_launch_or_skip(cuda)
    case = Case.make(cuda, rows, [rows, rows - 3, 0, 1], slots=[1, 5, 2, -1], **FULL)
    plain = case.run(FORMS[form])
    for _ in range(20):
        for found, expected in zip(
            case.run(FORMS[form], dependent_launch=True), plain, strict=True
        ):
            assert_bits(found, expected)


class Model:
    """Rounds of 30 layers in which every layer's values are what the layer before it put out.

    So a launch that reads its inputs too early, or a commit that runs ahead of the factors, shows
    in the bits. One layer's launch behind the commit is plain: that kernel writes states.
    """

    def __init__(
        self, device: torch.device, form: str, batch: int, rows: int, *, dependent: bool
    ) -> None:
        self.device, self.form, self.batch, self.rows = device, form, batch, rows
        self.dependent = dependent
        generator = torch.Generator().manual_seed(0)
        self.state_XSHVK = (
            torch.randn(LAYERS, batch + 1, VALUE_HEADS, DIM, DIM, generator=generator) / 4
        ).to(device)
        self.inputs = [make_inputs(generator, batch, rows, *SHAPE, device=device) for _ in range(2)]
        width = 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
        self.mixed_XBTC = torch.zeros(LAYERS + 1, batch, rows, width, dtype=BF16, device=device)
        self.factors = Factors.allocate(LAYERS, batch, *SHAPE, device=device)
        self.slots_B = int32(range(batch), device)
        self.lengths_B = int32([rows] * batch, device)
        self.accepted_B = int32([0] * batch, device)

    def values(self, layer: int) -> torch.Tensor:
        """The values of a layer's rows, [B, T, HV, V]."""
        values = self.mixed_XBTC[layer, :, :, 2 * KEY_HEADS * DIM :]
        return values.unflatten(2, (VALUE_HEADS, DIM))

    def fill(self, seed: int) -> None:
        """Fresh queries and keys in all layers, fresh values in the first, a fresh ragged batch."""
        generator = torch.Generator(self.device).manual_seed(seed)
        self.mixed_XBTC.normal_(generator=generator)
        host = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, self.rows + 1, (self.batch,), generator=host)
        lengths[0] = self.rows
        self.lengths_B.copy_(lengths)
        self.accepted_B.copy_(torch.rand(self.batch, generator=host) * (lengths + 1))
        slots = torch.randperm(self.batch + 1, generator=host)[: self.batch]
        if seed % 5 == 0:
            slots[-1] = -1
        self.slots_B.copy_(slots)

    def round(self) -> None:
        for x in range(LAYERS):
            inputs = self.inputs[x % 2]
            FORMS[self.form](
                self.mixed_XBTC[x],
                *inputs.tensors()[1:],
                self.state_XSHVK[x],
                self.slots_B,
                self.lengths_B,
                self.factors,
                x,
                self.values(x + 1),
                key_heads=KEY_HEADS,
                dependent_launch=self.dependent and x > 0,
            )
        commit(
            self.state_XSHVK,
            self.slots_B,
            self.accepted_B,
            self.factors,
            dependent_launch=self.dependent,
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "rows"), [(1, 4), (1, 16), (4, 8)])
def test_dependent_launches_in_a_graph(cuda, form, batch, rows):
    """50 replays with fresh inputs, lengths, slots and acceptance; states run through them."""
    dependent_launch_or_skip(cuda)
    eager = Model(cuda, form, batch, rows, dependent=False)
    graphed = Model(cuda, form, batch, rows, dependent=True)
    graphed.fill(0)
    before = graphed.state_XSHVK.clone()
    graphed.round()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Two rounds: the second one's first layer is behind a commit.
        graphed.round()
        graphed.round()
    graphed.state_XSHVK.copy_(before)
    for seed in range(1, 51):
        for model in (eager, graphed):
            model.fill(seed)
        eager.round()
        eager.round()
        graph.replay()
        assert_bits(graphed.mixed_XBTC, eager.mixed_XBTC)
        assert_bits(graphed.state_XSHVK, eager.state_XSHVK)
    assert eager.state_XSHVK.isfinite().all()


def copy_inputs(inputs: Inputs, other: Inputs) -> None:
    """Inputs overwritten in place, as a graph needs it."""
    for target, source in zip(inputs.tensors(), other.tensors(), strict=True):
        target.copy_(source)


@pytest.mark.parametrize("form", FORMS)
def test_graph_reads_lengths_and_slots_on_the_device(cuda, form):
    case = Case.make(cuda, 16, [16] * 4, **FULL)
    slots, lengths = case.slots_B.clone(), case.lengths_B.clone()
    arguments = (case.state_SHVK, case.slots_B, case.lengths_B, case.factors, 1, case.out_BTHV)

    def launch(*_: object, **__: object) -> None:
        FORMS[form](*case.inputs.tensors(), *arguments, key_heads=KEY_HEADS)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        copy_inputs(
            case.inputs,
            make_inputs(generator, 4, 16, *SHAPE, device=cuda),
        )
        case.lengths_B.copy_(torch.randint(0, 19, (4,), generator=generator))
        case.slots_B.copy_(slots[torch.randperm(4, generator=generator).to(cuda)])
        case.slots_B[int(torch.randint(4, (1,), generator=generator))] = -1
        case.check(lambda *_, **__: graph.replay())
    assert not torch.equal(case.lengths_B, lengths)


@pytest.mark.parametrize("form", FORMS)
def test_launches_are_deterministic(cuda, form):
    case = Case.make(cuda, 16, [16, 9, 0, 3], **FULL)
    first = case.run(FORMS[form])
    for _ in range(50):
        for found, expected in zip(case.run(FORMS[form]), first, strict=True):
            assert_bits(found, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", ["nodecay", None])
def test_chain_at_the_full_shape(cuda, form, regime):
    rounds = Chain(
        cuda,
        FORMS[form],
        batch=2,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        dim=DIM,
        regime=regime,
    )
    for _ in range(200):
        rounds.round()
    assert_no_drift(rounds.state_errors)
    assert_no_drift(rounds.output_errors)
    rounds.finish()


def test_lazy_chain_at_the_full_shape(cuda):
    rounds = Chain(
        cuda,
        FORMS["block"],
        batch=2,
        layers=2,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        dim=DIM,
        lazy=True,
    )
    for _ in range(100):
        rounds.round()
    assert_no_drift(rounds.output_errors)
    assert rounds.finish() < 3e-6


def test_bf16_chain_stays_at_the_rounding_of_its_state(cuda):
    """Gates forget, so the roundings of old rounds go with what they rounded."""
    rounds = Chain(cuda, FORMS["block"], batch=2, value_heads=4, regime="normal", state=BF16)
    for _ in range(100):
        rounds.round()
    assert max(rounds.state_errors) < 1e-2


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_lazy_rounds_in_a_graph(cuda, dependent):
    """Verify and advance captured once; states after a flush against committing every round."""
    if dependent:
        dependent_launch_or_skip(cuda)
    batch, rows, layers = 2, 8, 3
    generator = torch.Generator().manual_seed(3)
    pool = (torch.randn(layers, 3, VALUE_HEADS, DIM, DIM, generator=generator) / 4).to(cuda)
    eager, lazy = pool.clone(), pool.clone()
    inputs = [make_inputs(generator, batch, rows, *SHAPE, device=cuda) for _ in range(layers)]
    slots_B, lengths_B = int32([2, 0], cuda), int32([rows, rows], cuda)
    accepted_B = int32([0, 0], cuda)
    one, two = (Factors.allocate(layers, n, *SHAPE, device=cuda) for n in (batch, 2 * batch))
    pending = Pending.allocate(batch, device=cuda)
    out = torch.empty(2, layers, batch, rows, VALUE_HEADS, DIM, device=cuda)

    def lazy_round() -> None:
        for x in range(layers):
            FORMS["block"](
                *inputs[x].tensors(),
                lazy[x],
                slots_B,
                lengths_B,
                two,
                x,
                out[1, x],
                key_heads=KEY_HEADS,
                pending=pending,
                dependent_launch=dependent and x > 0,
            )
        advance(pending, slots_B, accepted_B)

    lazy_round()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lazy_round()
    for x in (lazy, eager):
        x.copy_(pool)
    pending.count_B.zero_()
    for _ in range(30):
        for x in range(layers):
            copy_inputs(inputs[x], make_inputs(generator, batch, rows, *SHAPE, device=cuda))
        accepted_B.copy_(torch.randint(0, rows + 1, (batch,), generator=generator))
        out.fill_(torch.nan)
        graph.replay()
        for x in range(layers):
            arguments = (eager[x], slots_B, lengths_B, one, x, out[0, x])
            FORMS["block"](*inputs[x].tensors(), *arguments, key_heads=KEY_HEADS)
        commit(eager, slots_B, accepted_B, one)
        assert_accurate(head_errors(out[1], out[0]))
    flush(lazy, slots_B, two, pending)
    assert_accurate(head_errors(lazy[:, [2, 0]], eager[:, [2, 0]]))
    assert_bits(lazy[:, 1], pool[:, 1])


def test_commit_with_windows_in_a_graph(cuda):
    """Counts and slots change between replays; nothing accepted leaves every bit."""
    channels, batch, rows = 8192, 4, 16
    generator = torch.Generator().manual_seed(4)
    state = (torch.randn(2, 6, VALUE_HEADS, DIM, DIM, generator=generator) / 4).to(cuda)
    windows = ConvWindows(
        torch.randn(2, 6, channels, 3, generator=generator).to(cuda, BF16),
        torch.randn(2, batch, rows, channels, generator=generator).to(cuda, BF16),
    )
    case = Case.make(cuda, rows, [rows] * batch, slots=[0, 1, 2, 3], **FULL)
    factors = Factors.allocate(2, batch, *SHAPE, device=cuda)
    for x in range(2):
        arguments = (state[x], case.slots_B, case.lengths_B, factors, x, case.out_BTHV)
        FORMS["block"](*case.inputs.tensors(), *arguments, key_heads=KEY_HEADS)
    accepted_B = int32([0] * batch, cuda)

    def launch(pool: torch.Tensor, conv: ConvWindows, dependent: bool = False) -> None:
        commit(
            pool,
            case.slots_B,
            accepted_B,
            factors,
            windows=conv,
            dependent_launch=dependent,
        )

    dependent = torch.cuda.get_device_capability(cuda) >= (9, 0)
    launch(state, windows, dependent)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(state, windows, dependent)
    before = state.clone(), windows.pool_XSCW.clone()
    graph.replay()
    assert_bits(state, before[0])
    assert_bits(windows.pool_XSCW, before[1])
    for _ in range(5):
        accepted_B.copy_(torch.randint(0, rows + 1, (batch,), generator=generator))
        case.slots_B.copy_(torch.randperm(6, generator=generator)[:batch])
        case.slots_B[2] = -1
        twin = ConvWindows(windows.pool_XSCW.clone(), windows.raw_XRTC)
        expected = state.clone()
        launch(expected, twin)
        graph.replay()
        assert_bits(state, expected)
        assert_bits(windows.pool_XSCW, twin.pool_XSCW)
