"""Arms of the certificate on the reference engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from hybridspec.certify.texts import Difference, Task, Text, first_difference
from hybridspec.errors import ModelError, PromptError
from hybridspec.request import LengthRule, SamplingParams

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine, Request
    from hybridspec.reference.target import Target
    from hybridspec.reference.tokenizer import Tokenizer

# How far rounding may move a logit, in units of the type's epsilon times the largest logit. Sums of
# float32 and float64 are rounded in their own type, those of the short types in float32, so that
# there only what is stored between layers is rounded.
ROUNDINGS = {
    torch.float64: 16.0,
    torch.float32: 16.0,
    torch.bfloat16: 4.0,
    torch.float16: 4.0,
}


def tie_bound(dtype: torch.dtype, largest_logit: float) -> float:
    """Largest gap between two logits, in logits, that counts as rounding of `dtype`."""
    return ROUNDINGS[dtype] * torch.finfo(dtype).eps * largest_logit


@dataclass
class FiniteTarget:
    """A target whose logits are checked: NaN would make every comparison below say nothing."""

    real: Target

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def logits(self, normed_RH: torch.Tensor) -> torch.Tensor:
        """The LM head."""
        logits = self.real.logits(normed_RH)
        bad = int(logits.numel() - torch.isfinite(logits).sum())
        if bad:
            raise ModelError(
                f"{bad} of {logits.numel()} logits are NaN or infinite; nothing can be certified "
                "on them: check the weights, or use --dtype float32"
            )
        return logits


class EngineArms:
    """Decodes tasks with and without drafts.

    Args:
        engine: idle; used by this object alone from now on.
        rule: how rounds of the arm under test choose their lengths.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, rule: LengthRule) -> None:
        engine.target = cast("Target", FiniteTarget(engine.target))
        self.engine, self.tokenizer, self.rule = engine, tokenizer, rule

    def encode(self, tasks: Sequence[Task], *, max_new_tokens: int) -> list[Task]:
        """Tasks with their token ids.

        Raises:
            PromptError: no tokens, or too long for the context.
        """
        found = []
        for task in tasks:
            ids = tuple(task.token_ids or self.tokenizer.encode(task.text))
            if not ids or len(ids) + max_new_tokens > self.engine.max_context:
                raise PromptError(
                    f"prompt {task.prompt_id} has {len(ids)} tokens; 1 to "
                    f"{self.engine.max_context - max_new_tokens} fit before {max_new_tokens} new "
                    "ones: leave it out, or change --max-context or --max-new-tokens"
                )
            found.append(Task(task.prompt_id, task.category, task.text, ids))
        return found

    def decode(
        self,
        arm: str,
        tasks: Sequence[Task],
        *,
        drafts: bool,
        batch: int,
        backwards: bool,
        max_new_tokens: int,
        done: Callable[[int], None],
    ) -> list[Text]:
        """Greedy texts in the order of `tasks`.

        Args:
            drafts: decode by the rule under test, else plainly.
            batch: requests together; a request that ends makes room for the next.
            backwards: start with the last task.
            done: is told the tokens of each text.
        """
        rule = self.rule if drafts else LengthRule("none")
        waiting = list(reversed(tasks) if not backwards else tasks)
        running: list[tuple[Task, Request, list[float]]] = []
        found: dict[str, Text] = {}
        try:
            while waiting or running:
                while waiting and len(running) < batch:
                    task = waiting.pop()
                    running.append((task, self.engine.add(task.token_ids, length_rule=rule), [0.0]))
                self._finish(arm, running, found, max_new_tokens, done)
                if running:
                    rounds = self.engine.step([request for _, request, _ in running])
                    for (_, _, spent), outcome in zip(running, rounds, strict=True):
                        spent[0] += outcome.observed_us
                    self._finish(arm, running, found, max_new_tokens, done)
        finally:
            for _, request, _ in running:
                self.engine.remove(request)
        return [found[task.prompt_id] for task in tasks]

    def _finish(
        self,
        arm: str,
        running: list[tuple[Task, Request, list[float]]],
        found: dict[str, Text],
        max_new_tokens: int,
        done: Callable[[int], None],
    ) -> None:
        """Take out what is complete."""
        for entry in list(running):
            task, request, spent = entry
            ids = tuple(request.log.tokens[len(task.token_ids) :][:max_new_tokens])
            if not request.finished and len(ids) < max_new_tokens:
                continue
            self.engine.remove(request)
            running.remove(entry)
            found[task.prompt_id] = Text(
                arm,
                task.prompt_id,
                task.category,
                self.tokenizer.decode(ids),
                ids,
                len(ids),
                spent[0],
            )
            done(len(ids))

    def compare(self, task: Task, plain: Text, other: Text) -> Difference | None:
        """The first difference, judged by plain decoding of what came before it."""
        at = first_difference(plain.token_ids, other.token_ids)
        if at is None:
            return None
        before = [*task.token_ids, *plain.token_ids[:at]]
        logits = self.logits_behind(before)
        bound = tie_bound(self.engine.target.dtype, float(logits.abs().max()))
        said = [text.token_ids[at] if at < len(text.token_ids) else None for text in (plain, other)]
        gap = float("inf")
        if said[0] is not None and said[1] is not None:
            gap = float(logits.max() - torch.minimum(logits[said[0]], logits[said[1]]))
        shown = [f"token {t}" if t is not None else "the end" for t in said]
        return Difference(task.prompt_id, at, shown[0], shown[1], gap, bound)

    def logits_behind(self, tokens: Sequence[int]) -> torch.Tensor:
        """[vocabulary] float64, of plain decoding behind `tokens`."""
        request = self.engine.add(tokens, length_rule=LengthRule("none"))
        self.engine.remove(request)
        return self.engine.last_prefill_logits.double()

    def sample(
        self, task: Task, *, sampling: Sequence[SamplingParams], tokens: int
    ) -> list[tuple[int, ...]]:
        """Up to `tokens` sampled tokens of each of the requests, decoded together by the rule."""
        requests: list[Request] = []
        try:
            for params in sampling:
                requests.append(
                    self.engine.add(task.token_ids, sampling=params, length_rule=self.rule)
                )
            size = len(task.token_ids) + tokens
            while left := [r for r in requests if not r.finished and len(r.log.tokens) < size]:
                self.engine.step(left)
            return [tuple(r.log.tokens[len(task.token_ids) : size]) for r in requests]
        finally:
            for request in requests:
                self.engine.remove(request)
