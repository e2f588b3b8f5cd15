"""Servers with the plugin that the client talks to: flags, configuration, stages of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NO_RADIX = "--disable-radix-cache"
# States are kept every so many tokens: prompts here are 128 long, so some lie inside answers. Five
# slots a running request, and some for what is cached.
RADIX = (
    "--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64",
    "--max-mamba-cache-size", "64", "--enable-cache-report",
)  # fmt: skip
# Four running requests take 20 slots; keys and values of the prompts and answers alone are more.
LITTLE_ROOM = ("--max-mamba-cache-size", "24", "--max-total-tokens", "4096")
# SGLang's own test switch: a request of the batch is taken back every so many passes.
RETRACT = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
# What a bundle of another run may differ in here: graphs are for up to four requests.
ALLOWED = ("graph_tiers", "max_batch")


@dataclass(frozen=True)
class PluginServer:
    """A server with the plugin.

    Attributes:
        about: for people.
        flags: further ones, the last of a kind counts.
        environment: of its process.
        config: of the plugin.
        caches: whether prefixes are cached, so that prompts go on from answers.
        evicts: whether there is room for few of them.
        retracts: whether requests are taken back.
        repeats: whether one client's greedy answers must come again to the last character.
        law: whether sampled answers are counted.
        chooses: whether a bundle's policy chooses lengths.
    """

    name: str
    about: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    caches: bool = False
    evicts: bool = False
    retracts: bool = False
    repeats: bool = False
    law: bool = False
    chooses: bool = False

    def arguments(self, common: Sequence[str]) -> list[str]:
        """All arguments of this server."""
        kept = [flag for flag in common if not (self.caches and flag == NO_RADIX)]
        return [*kept, *self.flags]


SERVERS = {
    server.name: server
    for server in (
        PluginServer("default", "no prefix cache", repeats=True, law=True),
        PluginServer("radix", "a prefix cache", RADIX, caches=True),
        PluginServer(
            "retract", "SGLang takes running requests back and reads them again",
            environment=RETRACT, retracts=True,
        ),
        PluginServer(
            "evict", "a prefix cache with so little room that prefixes are evicted",
            (*RADIX, *LITTLE_ROOM), caches=True, evicts=True,
        ),
        PluginServer(
            "paged", "a prefix cache, keys and values in pages of 16 tokens",
            (*RADIX, "--page-size", "16"), caches=True,
        ),
        PluginServer(
            "policy", "a bundle chooses lengths", config={"allow": ALLOWED}, law=True, chooses=True
        ),
        PluginServer(
            "select", "a bundle chooses lengths, and the first router corrects them",
            config={"allow": ALLOWED, "correction": "select"}, law=True, chooses=True,
        ),
    )
}  # fmt: skip
