"""What single requests ask for, on its way to the device: lengths, slots and prices of a batch.

A request says it in the `custom_params` of its sampling parameters:
`{"hybridspec": {"verify_length": 5}}` verifies 5 rows in every round, `{"hybridspec":
{"max_verify_length": 8}}` lets the policy choose up to 8, and without either the policy chooses.
`distinct_experts`, beside a `verify_length`, is for servers that were started to measure experts.
The host writes to the device only when the batch changes, from pinned memory and without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, RoundState

KEY = "hybridspec"
_FIELDS = ("policy", "verify_length", "max_verify_length", "record", "distinct_experts")
_RECORD_FIELDS = ("prompt_id", "category", "split")
# As `calibrate.prompts` has them, whose import takes pyarrow.
_SPLITS = ("calibration", "test")
# Pinned buffers in turn: the host is at most a few rounds ahead of the device.
_RING = 8


@dataclass(frozen=True)
class LengthRequest:
    """What one request asks for.

    Attributes:
        forced: exact rows of every round, 0: none.
        cap: longest length.
        distinct_experts: of every layer that the rows of a round go to together, 0: as the routers
            say.
    """

    forced: int = 0
    cap: int = BLOCK_SIZE
    distinct_experts: int = 0


def length_request(custom_params: Any, default: LengthRequest) -> LengthRequest:
    """Read a request's `custom_params`; without a word about lengths it is `default`.

    Raises:
        UsageError: a key or value that cannot be right.
    """
    if not isinstance(custom_params, dict) or custom_params.get(KEY) is None:
        return default
    asked = custom_params[KEY]
    if not isinstance(asked, dict):
        raise UsageError(f"custom_params.{KEY} = {asked!r}: pass an object, e.g. verify_length: 8")
    for name, value in asked.items():
        if name not in _FIELDS:
            raise UsageError(f"custom_params.{KEY}.{name} is unknown: pass {', '.join(_FIELDS)}")
        if name == "record":
            record_tag(custom_params)
        elif name == "policy":
            if value not in ("auto", "fixed"):
                raise UsageError(f"custom_params.{KEY}.policy = {value!r}: pass auto or fixed")
        elif name == "distinct_experts":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"custom_params.{KEY}.{name} = {value!r}: pass a number above 0")
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= BLOCK_SIZE:
            raise UsageError(
                f"custom_params.{KEY}.{name} = {value!r}: pass a number of rows, 1..{BLOCK_SIZE}"
            )
    cap = min(asked.get("max_verify_length", BLOCK_SIZE), default.cap)
    forced = asked.get("verify_length", 0)
    if asked.get("policy") == "fixed" and not forced:
        raise UsageError(f"custom_params.{KEY}.policy is fixed: add verify_length, 1..{BLOCK_SIZE}")
    distinct = asked.get("distinct_experts", 0)
    if distinct and not forced:
        raise UsageError(
            f"custom_params.{KEY}.distinct_experts are those of a number of rows: add "
            f"verify_length, 1..{BLOCK_SIZE}"
        )
    # Someone who asks for the policy gets it, though the server forces a length on the others.
    if not forced and "policy" not in asked and "max_verify_length" not in asked:
        forced = default.forced
    return LengthRequest(min(forced, default.cap), cap, distinct)


@dataclass(frozen=True)
class RecordTag:
    """What the rounds of a request are called in a trace; `split` is `calibration` or `test`."""

    prompt_id: str
    category: str
    split: str


def record_tag(custom_params: Any) -> RecordTag | None:
    """The tag of a request that asks to be recorded, None of one that does not.

    Raises:
        UsageError: a tag that cannot be right.
    """
    asked = custom_params.get(KEY) if isinstance(custom_params, dict) else None
    tag = asked.get("record") if isinstance(asked, dict) else None
    if tag is None:
        return None
    if (
        not isinstance(tag, dict)
        or set(tag) != set(_RECORD_FIELDS)
        or not all(isinstance(value, str) and value for value in tag.values())
        or tag["split"] not in _SPLITS
    ):
        raise UsageError(
            f"custom_params.{KEY}.record = {tag!r}: pass an object with {', '.join(_RECORD_FIELDS)}"
            f" as strings, the split one of {', '.join(_SPLITS)}"
        )
    return RecordTag(**tag)


@dataclass(frozen=True)
class Row:
    """A request of the batch: what identifies it, its slot, what it asks for."""

    key: tuple[Any, ...]
    history_slot: int
    lengths: LengthRequest


class BatchControls:
    """Writes the host's columns of a `RoundState` when the batch changes.

    Args:
        state: whose columns are written.
        price: tokens/us by batch size, for `lam_B`.
        spare_slots: first history slot that no request has; rows past the batch take from there.
    """

    def __init__(
        self, state: RoundState, price: Callable[[int], float], *, spare_slots: int
    ) -> None:
        self._state = state
        self._price = price
        self._spare = spare_slots
        self._key: tuple[Any, ...] | None = None
        on_gpu = state.device.type == "cuda"
        shape = tuple(state.controls_CB.shape)
        self._pinned = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_RING)
        ]
        self._sent: list[Any] = [None] * _RING
        self._turn = 0

    def forget(self) -> None:
        """The next batch counts as changed: slots may have been given to others."""
        self._key = None

    def update(self, keys: tuple[Any, ...], rows: Callable[[], Sequence[Row]]) -> bool:
        """Write the columns if the batch is another one; launches copies, waits for nothing.

        Args:
            keys: identifies the requests of the batch, in order.
            rows: called only if it is another one.

        Returns:
            whether it was; `lam_B` and the controls are then written, rows past the batch inactive.
        """
        if keys == self._key:
            return False
        batch = rows()
        self._key = keys
        state = self._state
        turn = self._turn
        self._turn = (turn + 1) % _RING
        if (sent := self._sent[turn]) is not None:
            sent.synchronize()
        pinned = self._pinned[turn]
        count = len(batch)
        padding = state.max_requests - count
        caps, forced, slots, spare = pinned
        caps.zero_()
        forced.zero_()
        caps[:count] = torch.tensor([row.lengths.cap for row in batch], dtype=torch.int32)
        forced[:count] = torch.tensor([row.lengths.forced for row in batch], dtype=torch.int32)
        slots[:count] = torch.tensor([row.history_slot for row in batch], dtype=torch.int32)
        slots[count:] = torch.arange(self._spare, self._spare + padding, dtype=torch.int32)
        spare[0] = count
        state.controls_CB.copy_(pinned, non_blocking=True)
        state.lam_B.fill_(self._price(count))
        if state.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._sent[turn] = event
        return True
