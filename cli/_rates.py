"""Predicted speeds of ways to choose the verify length, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping

from hybridspec.cli._output import Output


def tell_rates(rates: Mapping[str, float], output: Output) -> None:
    """Show what a replay of held-out rounds predicts; nothing if there is none.

    Args:
        rates: tokens/s by policy (`pricing.overall`).
    """
    if not rates:
        return
    output.table(
        "Predicted on this machine: single requests, held-out prompts, outside repetition loops",
        ("", "tokens/s", "over plain"),
        _rate_rows(rates),
    )


def _rate_rows(rates: Mapping[str, float]) -> list[tuple[str, str, str]]:
    fixed = {name: rate for name, rate in rates.items() if name.startswith("fixed-")}
    best = max(fixed, key=lambda name: fixed[name])
    shown = {
        "ar": "plain decoding",
        "fixed-16": "stock DFlash, 16 rows",
        best: f"best fixed length, {best.removeprefix('fixed-')} rows",
        "hybridspec": "HybridSpec",
        "oracle": "oracle length",
    }
    return [
        (label, f"{rates[name]:.0f}", f"{rates[name] / rates['ar']:.2f}x")
        for name, label in shown.items()
        if name in rates
    ]
