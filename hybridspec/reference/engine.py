"""The reference engine: prefill, rounds and slots of several requests over one target and drafter.

A laboratory and a small server, not a serving engine for fleets. One `step` is one round for all
the requests it is given, each with its own verify length (DESIGN section 6):

    draft 15 > signals > SELECT L > layer 0 GDN + first router on L + 1 rows > CORRECT L
    > rest of the target on L rows > ACCEPT > COMMIT recurrent state of all GDN layers at once
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridspec.acceptance import Verdict, accept_greedy, accept_sampled, distribution, draw
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.draft_switch import DraftSwitch
from hybridspec.errors import EnvironmentMissing, PromptError, UsageError
from hybridspec.policy import Policy, Selection
from hybridspec.reference.commit import commit
from hybridspec.reference.drafter import Drafter, DraftSignals
from hybridspec.reference.learning import history_of, learn
from hybridspec.reference.recording import round_record
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.sequence import Request
from hybridspec.reference.state import KVCache, StatePool
from hybridspec.reference.target import Target, TargetPass
from hybridspec.request import LengthRule, Round, SamplingParams, TokenLog

PREFILL_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class StepTiming:
    """Wall time of the parts of one step, microseconds.

    Attributes:
        draft_us: draft pass and selection, 0 where nothing was drafted.
        verify_us: target forward, correction and acceptance.
        commit_us: recurrent states, conv windows, logs.
        rows_run: target rows past the first router.
    """

    draft_us: float
    verify_us: float
    commit_us: float
    rows_run: int


class Engine:
    """Target, drafter and the state of up to `max_batch` requests.

    Args:
        target, drafter: models of one pair; a drafter is needed only where a rule drafts.
        max_batch: state slots.
        max_context: tokens a request may hold, prompt and output together.
        policy: for requests whose rule is `policy`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        max_batch: int,
        max_context: int,
        policy: Policy | None = None,
    ) -> None:
        self.target, self.drafter, self.policy = target, drafter, policy
        self.target_config = target.config
        self.drafter_config = None if drafter is None else drafter.config
        self.max_batch, self.max_context = max_batch, max_context
        self.device = target.device
        self.pool = StatePool(target.config, max_batch, target.dtype, target.device)
        self._eos = frozenset(target.config.eos_token_ids)
        # For measuring: policy rounds select and correct as ever, then run this many rows (0: no
        # draft pass).
        self.forced_length: int | None = None
        self.last_timing = StepTiming(0.0, 0.0, 0.0, 0)
        # [vocabulary], behind the last prompt that was added: to judge ties.
        self.last_prefill_logits = torch.empty(0)

    @property
    def free_slots(self) -> int:
        """Requests that can still be added."""
        return self.pool.free_slots

    # ------------------------------------------------------------------ requests

    def check_prompt(self, prompt_tokens: Sequence[int]) -> None:
        """Refuse a prompt that cannot be decoded from.

        Raises:
            PromptError: empty, too long for the context, or with an id outside the vocabulary.
        """
        if not prompt_tokens:
            raise PromptError("the prompt has no tokens; at least one is needed: add some text")
        if len(prompt_tokens) >= self.max_context:
            raise PromptError(
                f"the prompt has {len(prompt_tokens)} tokens; the context holds "
                f"{self.max_context} with at least one generated: shorten it or raise --max-context"
            )
        vocab = self.target_config.vocab_size
        bad = [t for t in prompt_tokens if not 0 <= t < vocab]
        if bad:
            raise PromptError(f"token id {bad[0]} lies outside the vocabulary 0..{vocab - 1}")

    @torch.inference_mode()
    def add(
        self,
        prompt_tokens: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        length_rule: LengthRule | None = None,
    ) -> Request:
        """Prefill a prompt and emit its first token.

        Args:
            prompt_tokens: token ids, at least one.
            sampling: greedy by default.
            length_rule: the policy where there is one, else 16 rows, else no drafts.

        Raises:
            PromptError: see `check_prompt`.
            UsageError: a rule that needs a drafter or policy this engine has not.
            EnvironmentMissing: all slots are taken.
        """
        self.check_prompt(prompt_tokens)
        sampling = sampling or SamplingParams()
        if length_rule is None:
            has = "policy" if self.policy else "fixed" if self.drafter else "none"
            length_rule = LengthRule(has)
        if length_rule.kind != "none" and self.drafter is None:
            raise UsageError("this engine has no drafter; only the rule 'none' works: load one")
        if length_rule.kind == "policy" and self.policy is None:
            raise UsageError("this engine has no policy: load a bundle, or use a fixed length")
        if self.pool.free_slots == 0:
            raise EnvironmentMissing(
                f"all {self.max_batch} slots are taken: wait, or raise --max-batch"
            )
        began = time.perf_counter()
        config = self.target_config
        cache = KVCache(
            len(config.attention_layers),
            config.num_kv_heads,
            config.head_dim,
            self.target.dtype,
            self.device,
        )
        drafts = self.drafter is not None and length_rule.kind != "none"
        request = Request(
            self.pool.take(),
            TokenLog(list(prompt_tokens), len(prompt_tokens), eos_token_ids=self._eos),
            sampling,
            length_rule,
            cache,
            self.drafter.new_cache() if drafts and self.drafter else None,
        )
        try:
            self._prefill(request)
        except BaseException:
            self.remove(request)
            raise
        request.prefill_us = (time.perf_counter() - began) * 1e6
        return request

    def _prefill(self, request: Request) -> None:
        tokens = request.log.tokens
        total = len(tokens)
        request.cache.reserve(total + BLOCK_SIZE)
        hidden = None
        for start in range(0, total, PREFILL_CHUNK_TOKENS):
            chunk = tokens[start : start + PREFILL_CHUNK_TOKENS]
            layout = RowLayout([request.slot], [start], [len(chunk)], self.device)
            state, routed = self.target.first_router(
                torch.tensor(chunk, device=self.device), layout, self.pool, in_place=True
            )
            hidden = self.target.finish(state, routed, self.pool, [request.cache])
            self._keep_features(request, state, slice(0, len(chunk)))
        assert hidden is not None
        request.log.context_tokens = total
        logits = self.target.logits(hidden[-1:])
        self.last_prefill_logits = logits[0]
        if request.coins is None:
            token = int(logits.argmax(-1))
        else:
            coin = request.coins.next_round()[-1]
            token = draw(distribution(logits, request.sampling)[0], coin)
        request.log.extend([token])
        self._stop_when_full(request)

    def remove(self, request: Request) -> None:
        """Free the request's slot at once; removing twice is harmless."""
        if request.slot >= 0:
            self.pool.give_back(request.slot)
            request.slot = -1
            request.pending_features.clear()
            request.log.finished = True

    def _stop_when_full(self, request: Request) -> None:
        if not request.finished and request.context_tokens + 1 >= self.max_context:
            request.log.finished, request.log.finish_reason = True, "length"

    def _keep_features(self, request: Request, state: TargetPass, rows: slice) -> None:
        if request.draft_cache is not None:
            request.pending_features.append([f[rows] for f in state.features])

    # ------------------------------------------------------------------ rounds

    @torch.inference_mode()
    def step(
        self, requests: Sequence[Request], *, record: bool = False, record_routes: bool = False
    ) -> list[Round]:
        """One round for all given requests together.

        Args:
            requests: unfinished requests of this engine, each once.
            record: attach signals of drafted rounds.
            record_routes: also the experts of every layer and row.

        Returns:
            one `Round` a request, in their order; their logs are advanced.
        """
        began = time.perf_counter()
        for request in requests:
            if request.slot < 0 or request.finished:
                raise UsageError("a finished or removed request cannot take part in a round")
        if len({request.slot for request in requests}) < len(requests):
            raise UsageError("a request can take part only once in a round")
        if not requests:
            return []
        drafting = [self._drafts(request, len(requests)) for request in requests]
        signals, selection, lengths = self._draft_and_select(requests, drafting)
        drafted = time.perf_counter()
        starts = [r.context_tokens for r in requests]
        slots = [r.slot for r in requests]
        policed = [d and r.rule.kind == "policy" for d, r in zip(drafting, requests, strict=True)]
        looking = list(lengths)
        if self.policy is not None and selection is not None:
            for i, request in enumerate(requests):
                if policed[i]:
                    looking[i] += self.policy.looks_ahead(lengths[i], self._cap(request))
        # Plain decoding of every request needs no factors: the pass advances the states itself.
        in_place = max(looking) == 1
        draft_lists = signals.tokens_BD.tolist() if signals else []
        blocks, row = [], 0
        for request, drafts in zip(requests, drafting, strict=True):
            blocks.append([request.anchor, *(draft_lists[row] if drafts else [])])
            row += drafts
        layout = RowLayout(slots, starts, looking, self.device)
        tokens = [t for block, n in zip(blocks, looking, strict=True) for t in block[:n]]
        state, routed = self.target.first_router(
            torch.tensor(tokens, device=self.device), layout, self.pool, in_place=in_place
        )
        finals = lengths
        if selection is not None and self.policy and self.policy.lookahead and not in_place:
            finals = self._correct(requests, policed, selection, layout, routed.experts_RK, lengths)
            if self.forced_length is not None:
                finals = lengths
        keep = layout if finals == looking else RowLayout(slots, starts, finals, self.device)
        for request, start, length in zip(requests, starts, finals, strict=True):
            request.cache.reserve(start + length)
        hidden = self.target.finish(state, routed, self.pool, [r.cache for r in requests], keep)
        logits = self.target.logits(hidden)
        verdicts = self._accept(requests, blocks, keep, logits)
        verified = time.perf_counter()
        committed = [v.accepted + 1 for v in verdicts]
        if not in_place:
            commit(self.pool, state.factors, keep, committed)
        rounds = []
        policed_row = draft_row = 0
        for i, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
            offset = keep.offsets[i]
            self._keep_features(request, state, slice(offset, offset + committed[i]))
            request.log.context_tokens += committed[i]
            emitted = [*blocks[i][1 : committed[i]], verdict.bonus]
            outcome = Round(
                emitted=request.log.extend(emitted),
                verify_length=finals[i] if drafting[i] else 0,
                selected_length=lengths[i] if drafting[i] else 0,
                accepted=verdict.accepted,
                predicted_us=None,
            )
            self._stop_when_full(request)
            if self.policy is not None:
                learn(
                    self.policy,
                    request,
                    outcome,
                    selection,
                    row=policed_row if policed[i] else None,
                    batch_size=len(requests),
                )
            if record and drafting[i] and signals is not None:
                rows = slice(offset, offset + keep.lengths[i])
                outcome.record = round_record(
                    anchor=blocks[i][0],
                    context_tokens=starts[i],
                    signals=signals,
                    draft_row=draft_row,
                    logits_LV=logits[rows],
                    routes=[r[rows] for r in state.routes] if record_routes else (),
                    num_experts=self.target_config.num_experts,
                )
            policed_row += policed[i]
            draft_row += drafting[i]
            rounds.append(outcome)
        ended = time.perf_counter()
        self.last_timing = StepTiming(
            (drafted - began) * 1e6 if signals else 0.0,
            (verified - drafted) * 1e6,
            (ended - verified) * 1e6,
            keep.rows,
        )
        elapsed = (ended - began) * 1e6
        for outcome in rounds:
            outcome.observed_us = elapsed
        return rounds

    def _cap(self, request: Request) -> int:
        """Longest block that fits the rule and, with the token behind it, the context."""
        return min(request.rule.length, self.max_context - request.context_tokens - 1)

    def _drafts(self, request: Request, batch_size: int) -> bool:
        if request.rule.kind == "none":
            return False
        if request.rule.kind == "policy" and self.policy is not None:
            if self.forced_length is not None:
                return self.forced_length > 0
            if request.switch is None:
                request.switch = DraftSwitch(self.policy.lam(batch_size), self.policy.credit)
            return request.switch.drafting or self.policy.static_reason is not None
        return True

    def _draft_and_select(
        self, requests: Sequence[Request], drafting: Sequence[bool]
    ) -> tuple[DraftSignals | None, Selection | None, list[int]]:
        """Draft pass and lengths; requests that do not draft get one row."""
        lengths = [1] * len(requests)
        members = [r for r, d in zip(requests, drafting, strict=True) if d]
        if not members or self.drafter is None:
            return None, None, lengths
        caches = []
        for request in members:
            assert request.draft_cache is not None
            caches.append(request.draft_cache)
            pending = request.pending_features
            if pending:
                layers = (
                    pending[0] if len(pending) == 1 else map(torch.cat, zip(*pending, strict=True))
                )
                features = torch.cat(list(layers), -1)
                self.drafter.inject(request.draft_cache, request.drafter_tokens, features)
                request.drafter_tokens += features.shape[0]
                pending.clear()
        contexts = [r.context_tokens for r in members]
        signals = self.drafter.draft([r.anchor for r in members], contexts, caches)
        places = [i for i, d in enumerate(drafting) if d]
        for i, request in zip(places, members, strict=True):
            lengths[i] = self._cap(request)
        rows = [j for j, r in enumerate(members) if r.rule.kind == "policy"]
        if not rows or self.policy is None:
            return signals, None, lengths
        policy, batch = self.policy, len(requests)
        of_policy = signals if len(rows) == len(members) else signals.select(rows)
        chosen = [members[j] for j in rows]
        lams = []
        for request in chosen:
            plain_us, _ = policy.latency(batch, request.context_tokens)
            lams.append(request.switch.lam(plain_us) if request.switch else policy.lam(batch))
        selection = policy.select(
            of_policy.p1_BD,
            of_policy.p2_BD,
            of_policy.entropy_BD,
            [r.context_tokens for r in chosen],
            lams,
            [self._cap(r) for r in chosen],
            batch,
            draft_tokens_BD=of_policy.tokens_BD,
            histories=[history_of(r, policy) for r in chosen],
        )
        for j, length in zip(rows, selection.lengths, strict=True):
            lengths[places[j]] = self.forced_length or length
        return signals, selection, lengths

    def _correct(
        self,
        requests: Sequence[Request],
        policed: Sequence[bool],
        selection: Selection,
        layout: RowLayout,
        experts_RK: torch.Tensor,
        lengths: list[int],
    ) -> list[int]:
        assert self.policy is not None
        finals, row = list(lengths), 0
        for i in range(len(requests)):
            if not policed[i]:
                continue
            if selection.fallback[row] is None and lengths[i] > 1:
                offset = layout.offsets[i]
                finals[i] = self.policy.correct(
                    experts_RK[offset : offset + layout.lengths[i]],
                    selection,
                    row,
                    num_experts=self.target_config.num_experts,
                )
            row += 1
        return finals

    def _accept(
        self,
        requests: Sequence[Request],
        blocks: Sequence[list[int]],
        keep: RowLayout,
        logits: torch.Tensor,
    ) -> list[Verdict]:
        best = logits.argmax(-1).tolist() if any(r.coins is None for r in requests) else []
        verdicts = []
        for i, request in enumerate(requests):
            rows = slice(keep.offsets[i], keep.offsets[i] + keep.lengths[i])
            drafts = blocks[i][1 : keep.lengths[i]]
            if request.coins is None:
                verdicts.append(accept_greedy(drafts, best[rows]))
            else:
                coins = request.coins.next_round()
                verdicts.append(accept_sampled(drafts, logits[rows], request.sampling, coins))
        return verdicts
