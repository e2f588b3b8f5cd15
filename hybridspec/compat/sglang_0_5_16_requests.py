"""Requests that SGLang 0.5.16's scheduler refuses: what they ask for cannot be had."""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.controls import LengthRequest, length_request, record_tag


def refuse_wrong_requests(
    default: LengthRequest,
    *,
    records: bool,
    unreachable: Callable[[LengthRequest], str | None],
) -> None:
    """Have the scheduler of this process refuse requests that ask for what cannot be right.

    Args:
        records: whether this server records rounds.
        unreachable: why what a request asks for cannot be had, None where it can.
    """
    from sglang.srt.managers import scheduler

    stock = scheduler.validate_dflash_request
    if getattr(stock, "hybridspec", False):
        return

    @functools.wraps(stock)
    def validate(req: Any, enable_overlap: bool) -> str | None:
        reason = stock(req, enable_overlap)
        if reason is not None:
            return reason
        try:
            lengths = length_request(req.sampling_params.custom_params, default)
            tag = record_tag(req.sampling_params.custom_params)
        except UsageError as error:
            return str(error)
        if tag is not None and not records:
            return (
                "custom_params.hybridspec.record: this server records nothing; start it with "
                "`record` in HYBRIDSPEC_CONFIG"
            )
        return unreachable(lengths)

    validate.hybridspec = True  # type: ignore[attr-defined]
    scheduler.validate_dflash_request = validate
