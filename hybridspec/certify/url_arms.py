"""Arms of the certificate over HTTP: two servers of the same target, one of them without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from hybridspec.certify.endpoint import Endpoint
from hybridspec.certify.texts import Difference, Task, Text, first_difference
from hybridspec.errors import PromptError

# Epsilons of the types and the number of them that is rounding, as in `engine_arms`. A server shows
# log-probabilities only, so the largest logit is taken as this.
ASSUMED_LARGEST_LOGIT = 16.0
BOUNDS = {
    "float32": 16.0 * 2.0**-23 * ASSUMED_LARGEST_LOGIT,
    "bfloat16": 4.0 * 2.0**-7 * ASSUMED_LARGEST_LOGIT,
    "float16": 4.0 * 2.0**-10 * ASSUMED_LARGEST_LOGIT,
}


class UrlArms:
    """Decodes tasks on the baseline or on the server under test.

    Args:
        baseline: the target alone. tested: with drafts.
        bound_logits: largest gap that is rounding.
    """

    def __init__(self, baseline: Endpoint, tested: Endpoint, *, bound_logits: float) -> None:
        self.baseline, self.tested, self.bound = baseline, tested, bound_logits

    def encode(self, tasks: Sequence[Task], *, max_new_tokens: int) -> list[Task]:
        """The tasks as they are: only the servers know their tokens."""
        for task in tasks:
            if not task.text:
                raise PromptError(f"prompt {task.prompt_id} is empty: remove it")
        return list(tasks)

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
        """Greedy texts in the order of `tasks`; `batch` requests are sent at a time."""
        server = self.tested if drafts else self.baseline

        def ask(task: Task) -> Text:
            answer = server.complete(task.text, max_tokens=max_new_tokens)
            return Text(
                arm,
                task.prompt_id,
                task.category,
                answer.text,
                (),
                answer.num_tokens,
                answer.seconds * 1e6,
                answer.tokens,
            )

        found: dict[str, Text] = {}
        pool = ThreadPoolExecutor(batch)
        try:
            order = reversed(tasks) if backwards else tasks
            for future in as_completed([pool.submit(ask, task) for task in order]):
                text = future.result()
                found[text.prompt_id] = text
                done(text.num_tokens)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [found[task.prompt_id] for task in tasks]

    def compare(self, task: Task, plain: Text, other: Text) -> Difference | None:
        """The first difference; its gap where the baseline told log-probabilities."""
        if plain.text == other.text:
            return None
        if plain.top and not other.top:
            return self._against_text(task, plain, other.text)
        ours = [token for token, _ in plain.top] or list(plain.text)
        theirs = [token for token, _ in other.top] or list(other.text)
        if bool(plain.top) != bool(other.top):
            ours, theirs = list(plain.text), list(other.text)
        at = first_difference(ours, theirs)
        if at is None:
            # The same tokens give another text: nothing that the log-probabilities could excuse.
            return Difference(task.prompt_id, len(ours), "", "", float("inf"), self.bound)
        ends = at >= min(len(ours), len(theirs))
        gap = float("inf") if ends else None
        if not ends and plain.top and other.top:
            gap = self._gap(plain.top[at][1], ours[at], theirs[at])
        said = [tokens[at] if at < len(tokens) else None for tokens in (ours, theirs)]
        shown = [repr(token) if token is not None else "the end" for token in said]
        return Difference(task.prompt_id, at, shown[0], shown[1], gap, self.bound)

    def _against_text(self, task: Task, plain: Text, other: str) -> Difference:
        """The first difference to a server that tells its text alone.

        Up to there both texts have the same tokens. The token behind is one that the rest of the
        other text begins with: of those among the baseline's best, the one that lies furthest
        below counts. Where the tokens' texts do not make up the text, nothing is known.
        """
        if "".join(token for token, _ in plain.top) != plain.text:
            at = first_difference(list(plain.text), list(other)) or 0
            shown = [repr(text[at : at + 12]) for text in (plain.text, other)]
            return Difference(task.prompt_id, at, shown[0], shown[1], None, self.bound)
        start = 0
        for at, (token, best) in enumerate(plain.top):
            rest = other[start:]
            if rest.startswith(token):
                start += len(token)
                continue
            others = [one for one in best if one and one != token and rest.startswith(one)]
            gaps = [self._gap(best, token, one) for one in others or [""]]
            known = [gap for gap in gaps if gap is not None]
            gap = max(known, default=None) if rest else float("inf")
            shown = repr(rest[:12]) if rest else "the end"
            return Difference(task.prompt_id, at, repr(token), shown, gap, self.bound)
        at = len(plain.top)
        rest = repr(other[start : start + 12])
        return Difference(task.prompt_id, at, "the end", rest, float("inf"), self.bound)

    def _gap(self, best: Mapping[str, float], plain: str, other: str) -> float | None:
        """How far below the best token the worse of both lies, by log-probabilities."""
        if not best:
            return None
        # A token that is not even among the best lies at least as far below as the last of these.
        least = min(best.values())
        gap = max(best.values()) - min(best.get(plain, least), best.get(other, least))
        known = plain in best and other in best
        return gap if known or gap > self.bound else None
