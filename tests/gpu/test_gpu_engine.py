"""The captured engine on a real GPU: bits, text, no waiting host, launches in its graph."""

from __future__ import annotations

import gc
from dataclasses import replace

import hazard_trees_kit
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from captured_kit import MAX_CONTEXT, SHAPE, Pair

from hybridspec.acceptance import Coins
from hybridspec.kernels.select.tables import DeviceTables
from hybridspec.reference.gpu.capture import CapturedGraph
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import GpuRound, RoundRules
from hybridspec.reference.random_pair import write_random_pair

pytestmark = pytest.mark.gpu

# Wide enough for every tile of a GPU; two attention layers, and experts that differ by row.
WIDE = replace(
    SHAPE,
    hidden_size=512,
    num_layers=6,
    full_attention_interval=3,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    gdn_key_heads=4,
    gdn_value_heads=8,
    gdn_key_dim=128,
    gdn_value_dim=128,
    num_experts=64,
    experts_per_token=8,
    expert_width=128,
    shared_width=128,
    vocab_size=2048,
    target_layer_ids=(0, 3),
    drafter_heads=8,
    drafter_kv_heads=4,
    drafter_head_dim=128,
    drafter_mlp_width=512,
    drafter_layers=2,
)
PROMPT = [(37 * i + 11) % 2048 for i in range(23)]
TOKENS = 40


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*write_random_pair(tmp_path_factory.mktemp("wide"), WIDE, seed=5))


@pytest.fixture(scope="module")
def engine(pair: Pair, cuda: torch.device) -> GpuEngine:
    with torch.inference_mode():
        made = pair.captured(torch.bfloat16, device=cuda)
        made.capture_prefill()
    return made


def tables(device: torch.device) -> DeviceTables:
    from hybridspec.reference.gpu.measured import longest_tables

    return longest_tables(device)


def captured(engine: GpuEngine, rules: RoundRules) -> tuple[GpuRound, CapturedGraph]:
    """A round and its masked graph."""
    from hybridspec.reference.gpu.capture import capture, warm_up

    round = engine.round(rules)
    engine.reset()
    warm_up(round, [round.max_rows])
    graph = capture(round.run, pool=torch.cuda.graph_pool_handle())
    engine.reset()
    return round, graph


@pytest.fixture(scope="module")
def tie(engine: GpuEngine) -> float:
    """ln(p1 / p2) below which another order of summation may decide, from plain decoding alone.

    The same text goes through the model token by token and in blocks of 16: what the two say of
    each token's lead over the best other one differs by rounding of bf16, in routers too. Twice
    the largest difference of some 80 tokens, because a later text may meet a larger one.
    """
    with torch.inference_mode():
        differences: list[float] = []
        _, plain = captured(engine, RoundRules("plain"))
        for turn in range(3):
            prompt = PROMPT[turn:] + PROMPT[: 2 * turn]
            engine.reset()
            first = engine.prefill([prompt])
            text = Decoder(engine).decode(plain.replay, first, max_new_tokens=TOKENS, rows=1)[0]
            leads = [margin for line in text.lines for margin in line.margins]
            for total in (32, 48):
                engine.reset()
                engine.prefill([prompt + text.tokens[: total - len(prompt)]])
                for row in range(16):
                    place = total - 16 + row - (len(prompt) - 1)
                    if 1 <= place < len(text.tokens):
                        logits = engine.target.logits_RV[row].float()
                        token = text.tokens[place]
                        mine = float(logits[token])
                        logits[token] = -torch.inf
                        differences.append(abs(mine - float(logits.max()) - leads[place - 1]))
        engine.reset()
    assert len(differences) > 60
    assert max(differences) < 0.75, "plain decoding of this model is too near ties to tell faults"
    return 2 * max(differences)


@torch.inference_mode()
def test_logits_and_drafts_are_near_the_eager_engine(engine: GpuEngine, pair: Pair) -> None:
    """bf16 and kernels against fp32 and plain PyTorch; a router near a tie moves some rows more."""
    from hybridspec.request import LengthRule

    eager = pair.eager()
    request = eager.add(PROMPT, length_rule=LengthRule("fixed", 16))
    _, graph = captured(engine, RoundRules("fixed"))
    engine.prefill([PROMPT])
    ours = engine.target.logits_RV[(len(PROMPT) - 1) % 16].float().cpu()
    theirs = eager.last_prefill_logits
    assert float((ours - theirs).norm() / theirs.norm()) < 0.15
    engine.target.anchors_B.fill_(request.tokens[-1])
    engine.buffers.fixed_B.fill_(16)
    graph.replay()
    record = eager.step([request], record=True)[0].record
    assert record is not None
    drafts = engine.target.drafts_BD[0].tolist()
    same = [ours == theirs for ours, theirs in zip(drafts, record.draft_tokens, strict=True)]
    assert sum(same) >= 10, same
    p1 = engine.buffers.signals.p1_R.cpu() - torch.tensor(record.p1)
    assert float(p1.abs().median()) < 0.03


@torch.inference_mode()
def test_rows_below_the_length_are_bitwise_equal(engine: GpuEngine) -> None:
    _, graph = captured(engine, RoundRules("fixed"))
    engine.prefill([PROMPT])
    saved = engine.snapshot()
    kept: dict[int, torch.Tensor] = {}
    for length in range(16, 0, -1):
        engine.restore(saved)
        engine.buffers.fixed_B.fill_(length)
        engine.target.logits_RV.fill_(float("nan"))
        graph.replay()
        kept[length] = engine.target.logits_RV[:length].clone()
        assert bool(kept[length].float().isfinite().all()), length
    unequal = [n for n in kept if not torch.equal(kept[n], kept[16][:n])]
    assert not unequal


@torch.inference_mode()
def test_masked_graph_equals_its_launches(engine: GpuEngine) -> None:
    round, graph = captured(engine, RoundRules("fixed"))
    engine.prefill([PROMPT])
    saved = engine.snapshot()
    outcomes = []
    for run in (round.run, graph.replay):
        engine.restore(saved)
        engine.buffers.fixed_B.fill_(11)
        for _ in range(3):
            run()
        outcomes.append((engine.target.logits_RV[:11].clone(), engine.target.starts_B.clone()))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def modes(device: torch.device) -> dict[str, RoundRules]:
    return {
        "fixed": RoundRules("fixed"),
        "policy": RoundRules("policy", tables=tables(device)),
        "paper": RoundRules("policy", tables=tables(device), correction="paper"),
        "select": RoundRules("policy", tables=tables(device), correction="select"),
        "quotient": RoundRules("quotient"),
    }


@pytest.mark.parametrize("mode", ["fixed", "policy", "paper", "select", "quotient"])
@torch.inference_mode()
def test_every_mode_decodes_the_plain_text_up_to_ties(
    engine: GpuEngine, cuda: torch.device, mode: str, tie: float
) -> None:
    _, plain = captured(engine, RoundRules("plain"))
    _, graph = captured(engine, modes(cuda)[mode])
    decoder = Decoder(engine)
    first = engine.prefill([PROMPT])
    saved = engine.snapshot()
    expected = decoder.decode(plain.replay, first, max_new_tokens=TOKENS, rows=1)[0]
    engine.restore(saved)
    engine.buffers.fixed_B.fill_(7)
    found = decoder.decode(graph.replay, first, max_new_tokens=TOKENS)[0]
    margins = [margin for line in expected.lines for margin in line.margins]
    for i, (ours, theirs) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        if ours != theirs:
            assert margins[i - 1] <= tie, (i, margins[i - 1], tie)
            break


@torch.inference_mode()
def test_a_graph_keeps_the_tables_of_its_round(engine: GpuEngine, cuda: torch.device) -> None:
    """Nobody else holds the round and its tables; memory that was freed would be overwritten."""
    replay = captured(engine, RoundRules("policy", tables=tables(cuda)))[1].replay
    gc.collect()
    junk = [torch.full((size,), -1, dtype=torch.int32, device=cuda) for size in (16, 512, 4096)]
    junk += [torch.full_like(part, -1) for part in junk for _ in range(64)]
    lines = Decoder(engine).decode(replay, engine.prefill([PROMPT]), max_new_tokens=TOKENS)[0].lines
    assert {line.fallback for line in lines} == {0}
    # A policy of this kind takes the longest length there is, its best fixed length as well.
    assert {line.length for line in lines} == {16}
    assert len(junk) > 64


@torch.inference_mode()
def test_trees_in_the_graph_choose_as_their_launches_do(
    engine: GpuEngine, cuda: torch.device
) -> None:
    from hybridspec.kernels.select.tables import pack_tables

    grid = np.ones(1, dtype=np.int64)
    priced = pack_tables(
        weights_F=np.zeros(5),
        position_bias_D=np.zeros(15),
        knots_x=np.linspace(0.0, 1.0, 9),
        knots_y=np.linspace(0.1, 0.9, 9),
        batch_sizes=grid,
        context_tokens=grid * 64,
        latency_us=np.linspace(1000.0, 1960.0, 17).reshape(1, 1, 17),
        tokens_per_us=np.full(1, 5e-3),
        best_fixed_length=grid * 9,
        device=cuda,
    )
    trees = hazard_trees_kit.packed(hazard_trees_kit.random_trees(5, trees=20), cuda)
    round, graph = captured(engine, RoundRules("policy", priced, trees))
    found = []
    first = engine.prefill([PROMPT])
    saved = engine.snapshot()
    for run in (round.run, graph.replay):
        engine.restore(saved)
        lines = Decoder(engine).decode(run, first, max_new_tokens=TOKENS)[0].lines
        assert {line.fallback for line in lines} == {0}
        found.append([line.length for line in lines])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


@torch.inference_mode()
def test_a_round_never_makes_the_host_wait(engine: GpuEngine, cuda: torch.device) -> None:
    """Replay, report copy and host bookkeeping under CUDA's sync debug mode."""
    _, graph = captured(engine, RoundRules("policy", tables=tables(cuda)))
    decoder = Decoder(engine)
    first = engine.prefill([PROMPT])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        text = decoder.decode(graph.replay, first, max_new_tokens=TOKENS)[0]
        # And the mode does notice a wait.
        with pytest.raises(RuntimeError):
            engine.target.starts_B.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(text.tokens) == TOKENS


@torch.inference_mode()
def test_launches_of_a_round(engine: GpuEngine, cuda: torch.device) -> None:
    """Twelve kernels a target layer, ten a drafter layer; splits of cuBLAS come on top."""
    from hybridspec.reference.gpu.capture import capture
    from hybridspec.reference.gpu.driver import driver

    round, _ = captured(engine, RoundRules("policy", tables=tables(cuda)))
    graph = capture(round.run, pool=torch.cuda.graph_pool_handle(), keep_graph=True)
    nodes = driver().count_nodes(graph.raw_cuda_graph())
    products = 4 * (WIDE.num_layers + WIDE.drafter_layers) + 4
    ours = 8 * WIDE.num_layers + 6 * WIDE.drafter_layers + 10
    assert set(nodes) <= {"kernel", "memset", "memcpy"}, nodes
    assert ours < nodes["kernel"] <= ours + 2 * products, nodes


@torch.inference_mode()
def test_sampled_rounds_follow_their_coins(engine: GpuEngine, cuda: torch.device) -> None:
    """The same coins give the same text; lengths do not change what plain sampling would draw."""
    _, graph = captured(engine, RoundRules("fixed", sampled=True))
    decoder = Decoder(engine)
    first = engine.prefill([PROMPT])
    saved = engine.snapshot()
    texts = []
    for seed in (1, 1, 2):
        engine.restore(saved)
        engine.buffers.fixed_B.fill_(9)
        coins = [Coins(seed)]
        texts.append(decoder.decode(graph.replay, first, max_new_tokens=20, coins=coins)[0].tokens)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@torch.inference_mode()
def test_batches_decode_what_single_requests_do(pair: Pair, cuda: torch.device, tie: float) -> None:
    batch = 4
    many = pair.captured(torch.bfloat16, batch=batch, device=cuda)
    prompts = [PROMPT[i:] + PROMPT[: 3 * i] for i in range(batch)]
    _, plain = captured(many, RoundRules("plain"))
    _, graph = captured(many, RoundRules("policy", tables=tables(cuda)))
    decoder = Decoder(many)
    first = many.prefill(prompts)
    saved = many.snapshot()
    expected = decoder.decode(plain.replay, first, max_new_tokens=16, rows=1)
    many.restore(saved)
    found = decoder.decode(graph.replay, first, max_new_tokens=16)
    for ours, theirs in zip(found, expected, strict=True):
        margins = [margin for line in theirs.lines for margin in line.margins]
        for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
            if a != b:
                assert margins[i - 1] <= tie, (i, margins[i - 1], tie)
                break


@torch.inference_mode()
def test_context_is_refused_before_it_overflows(engine: GpuEngine) -> None:
    """Rounds near the end of the context shorten and then stop, with nothing written beyond."""
    _, graph = captured(engine, RoundRules("fixed"))
    prompt = (PROMPT * 5)[: MAX_CONTEXT - 6]
    decoder = Decoder(engine)
    first = engine.prefill([prompt])
    engine.buffers.fixed_B.fill_(16)
    text = decoder.decode(graph.replay, first, max_new_tokens=TOKENS)[0]
    assert text.finished
    assert not text.failed
    assert len(prompt) + len(text.tokens) <= MAX_CONTEXT
