"""Configuration of the plugin: a JSON file named by `HYBRIDSPEC_CONFIG`.

An environment variable, because SGLang starts each rank in a new process and passes no flags of
plugins on; the environment is inherited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridspec import environ
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import UsageError

Rows = Annotated[int, Field(ge=1, le=16)]


class PluginConfig(BaseModel):
    """What the file may hold; everything has a default.

    Attributes:
        bundle: folder of the bundle; None: every round takes `fixed_length`.
        force_length: rows of every round of a request that asks for nothing itself.
        fixed_length: rows of a round without a policy: no bundle, or one that does not fit.
        max_length: longest length of any request.
        correction: what the first router may do to a length; needs routing in the bundle.
        lookahead: rows beyond the length that run up to the first router for the correction.
        hazards: `auto` takes trees where the bundle has them, `table` never does.
        history_entries: places of each table of a request's text, a power of two (32 bytes each).
        target: `hybridspec` replaces the target's GDN verification and masks its routes, `stock`
            leaves the target as SGLang runs it (16 rows, snapshots of every state); lengths then
            only limit acceptance.
        masked_layers: layers whose routes are masked; None: all.
        small_moe: experts in HybridSpec's own launches where a pass has at most 32 rows (two
            requests), and at 16 the routers' products; needs unquantised bf16 experts in SGLang's
            Triton runner. None: where that was measured to be faster, see
            `kernels/small_moe/tiles.py`.
        block_attention: attention of blocks in HybridSpec's own two launches, split over the
            context, where SGLang's backend is Triton's and the layers allow it.
        skinny_linear: dense projections of blocks of rows, the target's and the drafter's, in
            HybridSpec's own kernel where one was measured faster; unquantised bf16 weights.
        switches: of developers and profilers, by name: fields of `LaunchOptions` and
            `BetweenOptions`, which say what runs in kernels and launches of HybridSpec's own.
        telemetry: JSON file that counters are written to; with tensor parallelism rank 0's.
        telemetry_interval_s: seconds between two writes.
        record: folder for rounds of requests that ask to be recorded, see `round_recorder`.
        record_routes: also the experts of every layer and row; needs `target: hybridspec`.
        self_check: time a few rounds once the server is up and compare them with the bundle's
            costs, see `self_check`.
        allow: fields of a bundle's identity that may differ.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bundle: Path | None = None
    force_length: Rows | None = None
    fixed_length: Rows = 8
    max_length: Rows = 16
    correction: Literal["select", "paper", "off"] = "off"
    lookahead: Annotated[int, Field(ge=1, le=15)] = 1
    hazards: Literal["auto", "table"] = "auto"
    history_entries: Annotated[int, Field(ge=16, le=1 << 20)] = 4096
    target: Literal["hybridspec", "stock"] = "hybridspec"
    masked_layers: Annotated[int, Field(ge=0)] | None = None
    small_moe: bool | None = None
    block_attention: bool = True
    skinny_linear: bool = True
    switches: dict[str, bool] = Field(default_factory=dict)
    telemetry: Path | None = None
    telemetry_interval_s: Annotated[float, Field(gt=0)] = 2.0
    record: Path | None = None
    record_routes: bool = False
    self_check: bool = True
    allow: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_recording(self) -> PluginConfig:
        if self.record is not None and self.max_length < BLOCK_SIZE:
            raise ValueError(
                f"record with max_length {self.max_length}: rounds are recorded that verify "
                f"{BLOCK_SIZE} rows; leave max_length out"
            )
        if self.record_routes and (self.record is None or self.target != "hybridspec"):
            raise ValueError("record_routes needs record, and target hybridspec")
        return self

    @property
    def kernels(self) -> str:
        """What of the plugin's kernels is not as by default, as identities name it; else empty."""
        found = [] if self.target == "hybridspec" else [f"target:{self.target}"]
        found += [
            f"{name}:off"
            for name in ("small_moe", "block_attention", "skinny_linear")
            if getattr(self, name) is False
        ]
        if self.masked_layers is not None:
            found.append(f"masked_layers:{self.masked_layers}")
        found += [f"{name}:{'on' if on else 'off'}" for name, on in sorted(self.switches.items())]
        return "+".join(found)


def read_config(variables: Mapping[str, str] = os.environ) -> PluginConfig:
    """The configuration that the environment names, `HYBRIDSPEC_FORCE_LENGTH` on top.

    Raises:
        UsageError: no such file, or values that cannot be right.
    """
    path = environ.sglang_config(variables)
    config = PluginConfig()
    if path is not None:
        try:
            config = PluginConfig.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UsageError(
                f"HYBRIDSPEC_CONFIG={path} cannot be read ({error.strerror}): name a JSON file"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            wrong = f"{where} = {first.get('input')!r}: " if where else ""
            raise UsageError(
                f"{path}: {wrong}{first['msg']}; known keys: {', '.join(PluginConfig.model_fields)}"
            ) from error
    forced = environ.force_length(variables)
    return config if forced is None else config.model_copy(update={"force_length": forced})
