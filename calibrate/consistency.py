"""Whether the rounds of a trace belong together: one pair, each round once, none left between.

A trace is only as good as its story: a request's next round starts at the token that the last one
ended with. Two traces put into one file, rounds written twice or a column of another run break
that story long before they would show in a score.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridspec.artifacts.tables import NUM_DRAFTS
from hybridspec.calibrate.features import BoolArray, list_column
from hybridspec.calibrate.rounds import TraceIdentity, trace_identity
from hybridspec.errors import BundleError

_AGAIN = "record it again"


def check_consistency(table: pa.Table, *, path: object) -> pa.Table:
    """Return a checked trace whose rounds tell one story, or refuse it.

    Args:
        table: as `check_trace` returns it; rows in any order.
        path: named in every refusal.

    Raises:
        BundleError: a round twice; a prompt in two splits or categories; a token outside the
            vocabulary; a runner-up more probable than the top token; an accepted count that is not
            what the tokens say (greedy decoding); a round that does not go on where the one before
            ended.
    """
    if table.num_rows == 0:
        return table
    identity = trace_identity(table, path=path)
    encoded = table.column("prompt_id").combine_chunks().dictionary_encode()
    prompt = np.asarray(encoded.indices).astype(np.int64)
    names = encoded.dictionary.to_pylist()
    round_index = table.column("round").to_numpy().astype(np.int64)
    order = np.lexsort((round_index, prompt))
    first = np.diff(prompt[order], prepend=-1) != 0

    def at(position: int) -> str:
        row = order[position]
        return f"round {round_index[row]} of prompt {names[prompt[row]]!r}"

    def refuse(wrong: BoolArray, what: str, remedy: str = _AGAIN) -> None:
        """Refuse if any position of the sorted rounds is wrong; name the first one."""
        if wrong.any():
            raise BundleError(
                f"{path}: {at(int(np.argmax(wrong)))} {what} ({int(wrong.sum())} such round(s)): "
                f"{remedy}"
            )

    same = ~first & (np.diff(round_index[order], prepend=-1) == 0)
    refuse(
        same,
        "occurs twice",
        "traces of two runs or pairs were put together; give each its own file",
    )
    for column in ("split", "category"):
        values = np.asarray(table.column(column).to_pylist(), dtype=str)[order]
        refuse(
            ~first & (values != np.roll(values, 1)),
            f"has another {column} than the round before it",
            f"each prompt has one {column}, or held-out figures mean nothing; {_AGAIN}",
        )
    _check_tokens(table, identity, order, refuse)
    _check_chain(table, identity, order, first, refuse)
    return table


def _check_tokens(
    table: pa.Table, identity: TraceIdentity, order: npt.NDArray[Any], refuse: Any
) -> None:
    drafts, targets = (
        list_column(table, name)[order] for name in ("draft_tokens", "target_tokens")
    )
    anchor = table.column("anchor").to_numpy()[order]
    tokens = np.concatenate([anchor[:, None], drafts, targets], axis=1)
    refuse(
        ((tokens < 0) | (tokens >= identity.vocab_size)).any(axis=1),
        f"has a token outside 0..{identity.vocab_size - 1}",
        f"the trace is of another target than its identity says; {_AGAIN}",
    )
    p1, p2 = (list_column(table, name)[order] for name in ("p1", "p2"))
    refuse((p2 > p1 + 1e-6).any(axis=1), "has a p2 above its p1")
    if identity.temperature == 0.0:
        matched = np.cumprod(drafts == targets[:, :NUM_DRAFTS], axis=1).sum(axis=1)
        refuse(
            matched != table.column("accepted").to_numpy()[order],
            "has another accepted count than its draft and target tokens say",
        )


def _check_chain(
    table: pa.Table,
    identity: TraceIdentity,
    order: npt.NDArray[Any],
    first: BoolArray,
    refuse: Any,
) -> None:
    """Of rounds that follow each other; a trace may leave some out."""
    columns = ("round", "accepted", "generated_tokens", "context_tokens", "anchor")
    round_index, accepted, generated, context, anchor = (
        table.column(name).to_numpy()[order].astype(np.int64) for name in columns
    )
    follows = ~first & (np.diff(round_index, prepend=-1) == 1)
    emitted = np.roll(accepted, 1) + 1
    for name, values in (("generated_tokens", generated), ("context_tokens", context)):
        refuse(
            follows & (np.diff(values, prepend=0) != emitted),
            f"has {name} that do not continue the round before it",
            f"rounds of several runs are mixed; {_AGAIN}",
        )
    if identity.temperature == 0.0:
        targets = list_column(table, "target_tokens")[order]
        ended = np.roll(targets[np.arange(len(order)), accepted], 1)
        refuse(
            follows & (anchor != ended),
            "starts at another token than the round before it ended with",
            f"rounds of several runs are mixed; {_AGAIN}",
        )
