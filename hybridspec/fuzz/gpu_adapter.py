"""The captured engine under the fuzzer: its graphs on a GPU, its launches one by one on a CPU.

Requests join and leave single slots, which the engine's own batches do not: a prompt is prefilled
in blocks in which the other slots have no rows. A step plays one round for each kind of plan in it,
so graphs of all kinds follow one another; who has no part in a round has a limit of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridspec.acceptance import Coins
from hybridspec.artifacts.tables import NUM_DRAFTS
from hybridspec.errors import UsageError
from hybridspec.fuzz.adapter import LOGITS, EngineFacts, Memory, Outcome, PlainText
from hybridspec.fuzz.gpu_plain import GpuPlainText, PlainSlot, launcher
from hybridspec.fuzz.gpu_rounds import Kind, PlannedRound
from hybridspec.fuzz.noise import PARTS, Noise, measure_noise
from hybridspec.fuzz.operations import Join, Plan
from hybridspec.fuzz.plain import CONV, KEYS, RECURRENT, VALUES
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.config import load_drafter_config, load_target_config
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.flash import BLOCK_KEYS
from hybridspec.reference.gpu.round import RoundRules
from hybridspec.reference.gpu.target import MakeGdn
from hybridspec.reference.gpu.weights import folder_tensors, load_drafter, load_target

MAX_REQUESTS = 3
MAX_CONTEXT = 560
CONTROL_TOKENS = 96


@dataclass
class _Slot:
    tokens: list[int]
    slot: int
    coins: Coins | None


def planned_drafts(plan: Plan, continuation: Sequence[int], vocab: int) -> list[int]:
    """15 drafts: the continuation as far as the plan has it right, then wrong ones."""
    right = min(plan.right, len(continuation))
    drafts = [*continuation[:right], *((token + 1) % vocab for token in continuation[right:])]
    # Behind the first wrong draft anything will do.
    return drafts + [(7 * place) % vocab for place in range(len(drafts), NUM_DRAFTS)]


class GpuAdapter:
    """Drives one captured engine; tolerances are measured when it is made, see `noise`.

    Args:
        target_folder, drafter_folder: of one pair, of a shape that the kernels take.
        device: `cuda` with `dtype` bfloat16, or `cpu` with float32 in Triton's interpreter.
        max_requests: slots, 2..8. max_context: tokens of a request.
        make_gdn: another form of the engine's GDN layers; plain decoding keeps the usual one.
        noise: of an earlier adapter of the same pair, device and shape, in place of a control.
        control_tokens: rounds of the control.

    Attributes:
        noise: what rounding is.

    Raises:
        ModelError: a folder that is no such model.
        EngineRefusal: rounding of this pair could hide a fault.
    """

    def __init__(
        self,
        target_folder: Path,
        drafter_folder: Path,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        max_requests: int = MAX_REQUESTS,
        max_context: int = MAX_CONTEXT,
        make_gdn: MakeGdn | None = None,
        noise: Noise | None = None,
        control_tokens: int = CONTROL_TOKENS,
    ) -> None:
        if max_requests < 2:
            raise UsageError(f"max_requests {max_requests}: neighbours are part of it; pass 2..8")
        where = torch.device(device)
        config = load_target_config(target_folder)
        weights = load_target(
            config, folder_tensors(target_folder, where), dtype=dtype, device=where
        )
        drafter = load_drafter(
            load_drafter_config(drafter_folder),
            folder_tensors(drafter_folder, where),
            dtype=dtype,
            device=where,
        )
        self.engine = GpuEngine(
            weights, drafter, batch=max_requests, max_context=max_context, make_gdn=make_gdn
        )
        self._plain_slot = PlainSlot(weights, max_context=max_context)
        self._block = launcher(self.engine.round(RoundRules("prefill")))
        self._rounds: dict[tuple[Kind, bool], tuple[PlannedRound, Callable[[], None]]] = {}
        self._live: dict[int, _Slot] = {}
        # Sampled rounds need these before anything is captured.
        self._sampling = self.engine.sampling_buffers()
        self.facts = EngineFacts(
            name="captured",
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=config.vocab_size,
            max_requests=max_requests,
            max_context=max_context,
            boundaries=(BLOCK_ROWS, BLOCK_KEYS),
            prefix_cache=False,
            tolerance=dict.fromkeys(PARTS, 0.0),
            tie_logits=0.0,
        )
        self.noise = noise or measure_noise(
            self,
            layers=config.num_layers,
            unit_roundoff=torch.finfo(dtype).eps / 2,
            tokens=control_tokens,
        )
        tolerance = self.noise.tolerance
        # Both the best logit and the emitted token's may be off.
        self.facts = replace(self.facts, tolerance=tolerance, tie_logits=2 * tolerance[LOGITS])

    @property
    def free_requests(self) -> int:
        """Slots without a request."""
        return self.facts.max_requests - len(self._live)

    def reset(self) -> None:
        """Empty slots; captured graphs stay, and what lies in the caches is overwritten."""
        self._live.clear()
        self.engine.reset()
        self._plain_slot.owner = None

    def plain_text(self, prompt: Sequence[int]) -> PlainText:
        """Rounds of one row in an engine of one slot."""
        return GpuPlainText(self._plain_slot, prompt)

    def _round(self, kind: Kind, sampled: bool) -> tuple[PlannedRound, Callable[[], None]]:
        made = self._rounds.get((kind, sampled))
        if made is None:
            # Warming up and capturing run the round, with limits of 0: nobody moves.
            self.engine.buffers.limits_B.zero_()
            round = PlannedRound(self.engine, kind, sampled=sampled)
            made = self._rounds[kind, sampled] = (round, launcher(round))
        return made

    @torch.inference_mode()
    def join(self, operation: Join, prompt: Sequence[int]) -> Outcome:
        """Clear a slot and prefill it beside the others; the first token is always greedy."""
        taken = {live.slot for live in self._live.values()}
        slot = next(s for s in range(self.facts.max_requests) if s not in taken)
        target, report = self.engine.target, self.engine.buffers.report
        target.gdn.state_XSHVK[:, slot].zero_()
        target.gdn.windows_XSCW[:, slot].zero_()
        target.starts_B[slot] = 0
        width = 0
        for start in range(0, len(prompt), BLOCK_ROWS):
            block = prompt[start : start + BLOCK_ROWS]
            width = len(block)
            target.anchors_B[slot] = block[0]
            drafts = torch.zeros(NUM_DRAFTS, dtype=torch.int32)
            drafts[: width - 1] = torch.tensor(block[1:], dtype=torch.int32)
            target.drafts_BD[slot].copy_(drafts)
            report.lengths_B.zero_()
            report.lengths_B[slot] = width
            self._block()
        first = int(target.anchors_B[slot])
        sampled = operation.temperature > 0.0
        self._sampling.inverse_temperature_B11[slot] = 1.0 / (operation.temperature or 1.0)
        tokens = [*prompt, first]
        self._live[operation.key] = _Slot(tokens, slot, Coins(operation.seed) if sampled else None)
        return Outcome(
            [first],
            0,
            0,
            len(tokens) >= self.facts.max_context,
            target.logits_RV.view(-1, BLOCK_ROWS, target.logits_RV.shape[1])[slot, width - 1, None],
        )

    def step(
        self, plans: Mapping[int, Plan], continuations: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Outcome]:
        """A round for each kind of plan and of acceptance."""
        groups: dict[tuple[Kind, bool], list[int]] = {}
        for key, plan in plans.items():
            kind: Kind = "plain" if plan.rows == 0 else "cut" if plan.dropped else "fixed"
            groups.setdefault((kind, self._live[key].coins is not None), []).append(key)
        outcomes: dict[int, Outcome] = {}
        for (kind, sampled), keys in groups.items():
            members = {key: plans[key] for key in keys}
            outcomes |= self._play(kind, sampled, members, continuations)
        return outcomes

    @torch.inference_mode()
    def _play(
        self,
        kind: Kind,
        sampled: bool,
        plans: Mapping[int, Plan],
        continuations: Mapping[int, Sequence[int]],
    ) -> dict[int, Outcome]:
        round, launch = self._round(kind, sampled)
        buffers, vocab = self.engine.buffers, self.facts.vocab_size
        limits, lengths = torch.zeros_like(buffers.limits_B, device="cpu").repeat(2, 1)
        script = torch.zeros(round.script_BD.shape, dtype=torch.int32)
        coins = torch.zeros(self._sampling.coins_BC.shape, dtype=torch.float64)
        for key, plan in plans.items():
            live = self._live[key]
            limits[live.slot] = plan.rows + plan.dropped if kind == "cut" else BLOCK_ROWS
            lengths[live.slot] = plan.rows
            drafts = planned_drafts(plan, continuations[key], vocab)
            script[live.slot] = torch.tensor(drafts, dtype=torch.int32)
            if live.coins is not None:
                coins[live.slot] = torch.tensor(live.coins.next_round(), dtype=torch.float64)
        buffers.limits_B.copy_(limits)
        buffers.fixed_B.copy_(lengths)
        round.script_BD.copy_(script)
        if sampled:
            self._sampling.coins_BC.copy_(coins)
        launch()
        report = buffers.report
        emitted_BT, counts, accepted, verified = (
            values.tolist()
            for values in (
                report.emitted_BT,
                report.commit_rows_B,
                report.accepted_B,
                report.lengths_B,
            )
        )
        rows = round.max_rows
        logits = self.engine.target.logits_RV[: self.engine.batch * rows]
        logits_BTV = logits.view(self.engine.batch, rows, -1)
        outcomes = {}
        for key in plans:
            live = self._live[key]
            new = emitted_BT[live.slot][: counts[live.slot]]
            live.tokens += new
            outcomes[key] = Outcome(
                new,
                0 if kind == "plain" else verified[live.slot],
                accepted[live.slot],
                len(live.tokens) >= self.facts.max_context,
                # The next round writes over them.
                logits_BTV[live.slot, : len(new)].clone(),
            )
        return outcomes

    def memory(self, key: int) -> Memory:
        """Views of a slot; cursor and newest token are the device's."""
        live, target = self._live[key], self.engine.target
        context = int(target.starts_B[live.slot])
        return Memory(
            [*live.tokens[:-1], int(target.anchors_B[live.slot])],
            context,
            {
                KEYS: target.keys_XBCGD[:, live.slot, :context],
                VALUES: target.values_XBCGD[:, live.slot, :context],
                CONV: target.gdn.windows_XSCW[:, live.slot],
                RECURRENT: target.gdn.state_XSHVK[:, live.slot],
            },
        )

    def leave(self, key: int, *, aborted: bool) -> None:
        """The slot is the next one's; nothing runs between two rounds that could be torn out."""
        del aborted
        del self._live[key]
