"""One rule of what the plugin refuses at start, and the usual ways to find what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Finding = Callable[[Any], str | None]


@dataclass(frozen=True)
class Rule:
    """One refusal.

    Attributes:
        flag: the flag of SGLang with the values that are refused, as a reader writes it.
        reason: why the plugin cannot serve with it.
        remedy: what to set instead.
        finding: the offending flag and value of a `ServerArgs`, or None.
        example: fields of a `ServerArgs` that the rule refuses.
    """

    flag: str
    reason: str
    remedy: str
    finding: Finding = field(repr=False)
    example: Mapping[str, Any] = field(repr=False)


def over_one(flag: str, name: str) -> Finding:
    """A number above 1 in the field `name`."""

    def finding(args: Any) -> str | None:
        value = getattr(args, name)
        return f"{flag} {value}" if value is not None and value > 1 else None

    return finding


def other_than(flag: str, name: str, *allowed: object) -> Finding:
    """Another value than these in the field `name`."""

    def finding(args: Any) -> str | None:
        value = getattr(args, name)
        return None if value in allowed else f"{flag} {value}"

    return finding


def switched_on(**flags: str) -> Finding:
    """`flags` maps fields of `ServerArgs` to the flag that sets them."""

    def finding(args: Any) -> str | None:
        return next((flag for name, flag in flags.items() if getattr(args, name)), None)

    return finding
