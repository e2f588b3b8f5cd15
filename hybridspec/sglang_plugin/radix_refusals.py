"""Rules for the radix cache: with it, recurrent states are kept at places inside a text."""

from __future__ import annotations

from typing import Any

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.sglang_plugin.refusal_rule import Rule, switched_on

# Rows of two rounds; `prefix_snapshots` says why.
LEAST_TRACK_INTERVAL = 2 * BLOCK_SIZE
STOCK_WITH_RADIX_CACHE = (
    "a radix cache is refused with target stock: DFLASH of SGLang 0.5.16 takes none of the states "
    "that the cache believes it took; use target hybridspec, or --disable-radix-cache"
)


def caches_states(args: Any) -> bool:
    """Whether prefixes are cached together with recurrent states."""
    return bool(args.uses_mamba_radix_cache) and not args.disable_radix_cache


def _radix_cache(args: Any) -> str | None:
    strategy = args.mamba_radix_cache_strategy
    if not caches_states(args) or strategy == "extra_buffer":
        return None
    return f"a radix cache (--mamba-radix-cache-strategy {strategy})"


def _track_interval(args: Any) -> str | None:
    interval = args.mamba_track_interval
    short = caches_states(args) and interval < LEAST_TRACK_INTERVAL
    return f"--mamba-track-interval {interval}" if short else None


def _other_places_of_states(args: Any) -> str | None:
    flags = {
        "enable_int8_mamba_checkpoint": "--enable-int8-mamba-checkpoint",
        "strip_thinking_cache": "--strip-thinking-cache",
    }
    return switched_on(**flags)(args) if caches_states(args) else None


RADIX_RULES = (
    Rule(
        "a radix cache with --mamba-radix-cache-strategy other than extra_buffer, where the target "
        "has recurrent layers",
        "a cached prefix needs the recurrent state at its end, and the slot of its request has run "
        "on behind it: only a slot of its own can hold it",
        "use --mamba-radix-cache-strategy extra_buffer, or --disable-radix-cache",
        _radix_cache,
        {
            "disable_radix_cache": False,
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
        },
    ),
    Rule(
        f"--mamba-track-interval below {LEAST_TRACK_INTERVAL}, with a radix cache",
        "the scheduler sees one round late which slot of a request holds its latest state, so two "
        "rounds in a row must not both write one",
        "leave it at 256",
        _track_interval,
        {
            "disable_radix_cache": False,
            "mamba_radix_cache_strategy": "extra_buffer",
            "mamba_track_interval": 16,
        },
    ),
    Rule(
        "--enable-int8-mamba-checkpoint or --strip-thinking-cache, with a radix cache",
        "the first reads states while the plugin's stream may still write them, the second files a "
        "state from the answer under the prompt alone",
        "leave it out",
        _other_places_of_states,
        {
            "disable_radix_cache": False,
            "mamba_radix_cache_strategy": "extra_buffer",
            "strip_thinking_cache": True,
        },
    ),
)
