"""Masks and correction inside a block of experts that is called as SGLang's is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")
sys.path.insert(0, str(Path(__file__).parent))

import policy_kit
import select_kit
from lookalike import forward_batch

from hybridspec.compat import sglang_0_5_16_target as compat
from hybridspec.errors import EngineRefusal, UsageError
from hybridspec.kernels.select import naive
from hybridspec.kernels.select.select import select
from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
from hybridspec.sglang_plugin.target.experts import RoutedExperts
from hybridspec.sglang_plugin.target.launches import LaunchOptions
from hybridspec.sglang_plugin.target.scope import VerifyScope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, HIDDEN, EXPERTS, TOP_K = 16, 32, 64, 4
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


class Routes(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


def routed(logits: torch.Tensor) -> Routes:
    weights, ids = logits.softmax(1).topk(TOP_K)
    return Routes(weights, ids.to(torch.int32), logits)


class Block(torch.nn.Module):
    """A router and experts in plain torch; it remembers the routes that its experts were given."""

    enable_shared_expert_fusion = False
    is_nextn = False

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        generator = torch.Generator(DEVICE).manual_seed(layer_id)
        self.layer_id, self.num_experts = layer_id, EXPERTS
        self.router_EH = torch.randn(EXPERTS, HIDDEN, generator=generator, device=DEVICE)
        self.weight_EHH = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator, device=DEVICE)
        self.given: list[Routes] = []

    def gate(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.router_EH.T, None

    class Router:
        topk_config = SimpleNamespace(top_k=TOP_K)

        def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> Routes:
            return routed(logits)

    topk = Router()

    def experts(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        self.given.append(routes)
        chosen = self.weight_EHH[routes.topk_ids.long()]
        return torch.einsum("rk,rkij,rj->ri", routes.topk_weights, chosen, x)

    def _forward_router_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states, self.topk(hidden_states, logits))


class Target:
    """Blocks with our half installed."""

    def __init__(
        self,
        *,
        requests: int = 3,
        blocks: int = 2,
        launches: LaunchOptions | None = None,
        **options: Any,
    ) -> None:
        self.blocks = [Block(layer) for layer in range(blocks)]
        self.state, self.scope = RoundState(requests, DEVICE), VerifyScope()
        self.half = RoutedExperts(
            self.blocks,
            self.scope,
            self.state,
            TargetOptions(**options),
            launches or LaunchOptions(),
        )
        self.half.install()

    def set_lengths(self, lengths: list[int]) -> None:
        self.state.lengths_B.copy_(torch.tensor(lengths, dtype=torch.int32))

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        with self.scope.entered():
            return [block._forward_router_experts(x) for block in self.blocks]


def hidden(requests: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(requests * ROWS, HIDDEN, generator=generator, device=DEVICE)


def live_rows(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(ROWS)[None] < torch.tensor(lengths)[:, None]).flatten().to(DEVICE)


@pytest.fixture(params=[False, True], ids=["engine-router", "fused-router"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether blocks say that their routers are plain; the fused router then takes their place."""
    plain = compat.PlainRouter(TOP_K, False, Routes) if request.param else None
    monkeypatch.setattr(compat, "plain_router", lambda block: plain)
    if request.param:
        monkeypatch.setattr(Block.Router, "__call__", lambda *arguments: pytest.fail("not fused"))
    return request.param


def full_pass(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The block outside our half, whatever its router was replaced with."""
    logits, _ = block.gate(x)
    return block.experts(x, routed(logits))


def same(one: torch.Tensor, other: torch.Tensor, fused: bool) -> bool:
    """Equal; a softmax that was summed in another order is close."""
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-5) if fused else one.equal(other))


def test_rows_that_count_keep_their_bits_and_the_others_load_nothing_new(fused: bool) -> None:
    target, lengths = Target(), [5, 0, 16]
    x, live = hidden(3), live_rows(lengths)
    full = [full_pass(block, x) for block in target.blocks]
    target.set_lengths(lengths)
    masked = target.run(x)
    for block, before, after in zip(target.blocks, full, masked, strict=True):
        assert same(before[live], after[live], fused)
        assert not after[~live].any()
        routes = block.given[-1]
        assert not routes.topk_weights[~live].any()
        anchor = routes.topk_ids[0]
        assert (routes.topk_ids[~live] == anchor).all(), "row 0 of the first active request"


def test_prefill_through_the_same_blocks_is_untouched() -> None:
    target = Target()
    target.set_lengths([1, 1, 1])
    x = hidden(1)[:7]
    out = target.blocks[0]._forward_router_experts(x)
    assert torch.equal(out, Block(0)._forward_router_experts(x))


@pytest.mark.usefixtures("fused")
def test_only_so_many_layers_are_masked() -> None:
    target = Target(blocks=3, num_layers_masked=1)
    target.set_lengths([1, 1, 1])
    target.run(hidden(3))
    weights = [bool(block.given[-1].topk_weights[1].any()) for block in target.blocks]
    assert weights == [False, True, True]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("rule", ["select", "paper"])
def test_correction_sets_the_length_that_later_layers_mask_by(rule: str) -> None:
    tables = select_kit.packed(policy_kit.random_policy(3), DEVICE)
    target = Target(requests=4, correction=rule, lookahead=1, tables=tables)
    state = target.state
    generator = torch.Generator(DEVICE).manual_seed(1)
    p1 = torch.rand(4, 15, generator=generator, device=DEVICE) * 0.3 + 0.7
    state.caps_B.copy_(torch.tensor([16, 16, 9, 0], dtype=torch.int32))
    context = torch.full((4,), 100, dtype=torch.int32, device=DEVICE)
    selection = state.selection_of(4)
    select(p1, (1 - p1) / 2, 1 - p1, context, state.caps_B, state.batch_size, tables, out=selection)
    # What select found is of other tables than these routes deserve: shorten somewhere.
    selection.lengths_B.copy_(torch.tensor([6, 11, 9, 0], dtype=torch.int32))
    selection.fallback_B.zero_()
    state.lengths_B.copy_(selection.lengths_B)
    x = hidden(4)
    block = target.blocks[0]
    ids = routed(block.gate(x)[0]).topk_ids.view(4, ROWS, TOP_K)
    final, distinct = naive.correct(
        ids,
        selection.lengths_B,
        selection.score_BL,
        selection.price_B,
        selection.fallback_B,
        state.caps_B,
        tables,
        num_experts=EXPERTS,
        rule=rule,
        lookahead=1,
    )
    target.run(x)
    assert state.lengths_B.tolist() == final.tolist()
    assert state.lengths_B.tolist() != [6, 11, 9, 0], "the correction has something to correct"
    assert torch.equal(target.half.distinct_BL, distinct)
    live = live_rows(final.tolist())
    for block in target.blocks:
        assert not block.given[-1].topk_weights[~live].any()
        assert block.given[-1].topk_weights[live].all()


@pytest.mark.usefixtures("fused")
def test_routes_are_kept_as_routers_chose_them() -> None:
    target = Target(launches=LaunchOptions(keep_routes=True))
    target.set_lengths([1, 2, 1])
    x = hidden(2)
    target.run(x)
    kept = target.half.kept_XRK
    assert kept is not None
    for place, block in enumerate(target.blocks):
        assert torch.equal(kept[place, : len(x)], routed(block.gate(x)[0]).topk_ids)
    assert kept.shape == (2, 3 * ROWS, TOP_K)
    assert not kept[:, len(x) :].any()


@pytest.mark.usefixtures("fused")
def test_forced_routes_reach_the_experts_and_are_masked() -> None:
    target = Target(launches=LaunchOptions(force_routes=True))
    target.set_lengths([3, 1, 1])
    forced = target.half.forced_XRK
    assert forced is not None
    forced.copy_(torch.arange(forced.numel()).view_as(forced) % EXPERTS)
    target.run(hidden(1))
    for place, block in enumerate(target.blocks):
        given = block.given[-1].topk_ids
        assert torch.equal(given[:3], forced[place, :3])
        assert (given[3:] == forced[place, 0]).all()


@pytest.mark.usefixtures("fused")
def test_routes_are_kept_and_forced_at_once() -> None:
    target = Target(launches=LaunchOptions(keep_routes=True, force_routes=True))
    target.set_lengths([2, 1, 1])
    forced, kept = target.half.forced_XRK, target.half.kept_XRK
    assert forced is not None
    assert kept is not None
    forced.copy_(torch.arange(forced.numel()).view_as(forced) % EXPERTS)
    target.run(hidden(1))
    assert torch.equal(kept[:, :ROWS], forced[:, :ROWS])
    assert (target.blocks[1].given[-1].topk_ids[2:] == forced[1, 0]).all()


def test_fused_router_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "plain_router", lambda block: pytest.fail("asked"))
    target = Target(launches=LaunchOptions(fused_router=False))
    target.set_lengths([1, 1, 1])
    target.run(hidden(3))
    assert not target.blocks[0].given[-1].topk_weights[1:16].any()


def test_more_routes_than_the_fused_router_takes_are_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = compat.PlainRouter(17, False, Routes)
    monkeypatch.setattr(compat, "plain_router", lambda block: plain)
    target = Target()
    target.set_lengths([1, 1, 1])
    target.run(hidden(3))
    given = target.blocks[0].given[-1]
    assert given.topk_ids.shape[1] == TOP_K
    assert not given.topk_weights[1:16].any()


@pytest.mark.parametrize("options", [{"small_moe": True, "fused_router": False}, {}])
def test_fused_gate_runs_between_two_others(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="set all three"):
        LaunchOptions(fused_gate=True, **options)


def test_routers_that_are_not_the_engines_are_not_plain() -> None:
    assert compat.plain_router(Block(0)) is None


def test_scope_is_entered_by_verify_passes_alone() -> None:
    scope, seen = VerifyScope(), []

    class Model:
        def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> str:
            seen.append(scope.active)
            return "out"

    model = Model()
    scope.watch(model)
    assert model.forward(1, 2, forward_batch()) == "out"
    assert model.forward(1, 2, forward_batch=forward_batch(verifies=False)) == "out"
    assert seen == [True, False]
    assert not scope.active
    import inspect

    assert list(inspect.signature(model.forward).parameters)[-1] == "forward_batch"


def test_scope_is_left_when_a_pass_fails() -> None:
    scope = VerifyScope()
    model = SimpleNamespace(forward=lambda a, b, forward_batch: 1 / 0)
    scope.watch(model)
    with pytest.raises(ZeroDivisionError):
        model.forward(1, 2, forward_batch())
    assert not scope.active


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "guess"}, "unknown"),
        ({"correction": "select", "lookahead": 1}, "without tables"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Target(**options)


def test_routers_without_ids_are_refused() -> None:
    target = Target()
    for block in target.blocks:
        block.topk = lambda x, logits: SimpleNamespace(router_logits=logits)  # type: ignore
    with pytest.raises(EngineRefusal, match="--moe-runner-backend triton"):
        target.run(hidden(3))


def test_ids_of_minus_one_are_refused() -> None:
    with pytest.raises(UsageError, match="use 'alias'"):
        LaunchOptions(mask_mode="drop")
