"""A history as a JSON file that can be played again, anywhere the same pair is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybridspec import __version__
from hybridspec.artifacts.atomic import write_json
from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.errors import BundleError
from hybridspec.fuzz.operations import History, Join, Leave, Operation, Plan, Step
from hybridspec.fuzz.play import Violation

SCHEMA = "hybridspec.fuzz/1"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Plan(_Strict):
    request: Annotated[int, Field(ge=0)]
    rows: Annotated[int, Field(ge=0, le=BLOCK_SIZE)]
    right: Annotated[int, Field(ge=0, le=NUM_DRAFTS)] = 0
    dropped: Annotated[int, Field(ge=0, lt=BLOCK_SIZE)] = 0


class _Join(_Strict):
    do: Literal["join"]
    request: Annotated[int, Field(ge=0)]
    prompt: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    follows: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0


class _Step(_Strict):
    do: Literal["step"]
    plans: Annotated[list[_Plan], Field(min_length=1)]


class _Leave(_Strict):
    do: Literal["leave", "abort"]
    request: Annotated[int, Field(ge=0)]


class _Violation(_Strict):
    kind: str
    operation: int
    request: int | None
    message: str
    difference: float | None


class _Origin(_Strict):
    seed: int
    history: int
    minimal: bool


class _File(_Strict):
    format: Literal["hybridspec.fuzz/1"] = Field(alias="schema")
    hybridspec: str
    engine: str
    dtype: str
    target_digest: str
    drafter_digest: str
    max_requests: Annotated[int, Field(ge=1)]
    max_context: Annotated[int, Field(ge=2)]
    found_by: _Origin
    violation: _Violation
    operations: Annotated[
        list[Annotated[_Join | _Step | _Leave, Field(discriminator="do")]], Field(min_length=1)
    ]


@dataclass(frozen=True)
class Setting:
    """The engine that a history is played on.

    Attributes:
        engine, dtype: see `EngineFacts`.
        target_digest, drafter_digest: `digest.model_digest` of the folders.
        max_requests, max_context: of the engine.
    """

    engine: str
    dtype: str
    target_digest: str
    drafter_digest: str
    max_requests: int
    max_context: int


@dataclass(frozen=True)
class Finding:
    """A failing history and where it came from.

    Attributes:
        seed, number: of the random history that it was shrunk from.
        minimal: whether shrinking was finished.
    """

    setting: Setting
    seed: int
    number: int
    history: History
    violation: Violation
    minimal: bool


def write_finding(path: Path, finding: Finding) -> None:
    """Write a finding atomically, over an earlier form of it.

    Raises:
        EnvironmentMissing: the folder cannot be written to.
    """
    setting, violation = finding.setting, finding.violation
    write_json(
        path,
        {
            "schema": SCHEMA,
            "hybridspec": __version__,
            **vars(setting),
            "found_by": {
                "seed": finding.seed,
                "history": finding.number,
                "minimal": finding.minimal,
            },
            # A difference that is not finite says so in the message; JSON has no word for it.
            "violation": vars(violation) | {"difference": _finite(violation.difference)},
            "operations": [_as_json(operation) for operation in finding.history],
        },
    )


def read_finding(path: Path) -> Finding:
    """Read a finding.

    Raises:
        BundleError: no such file, or its content is not a history.
    """
    try:
        file = _File.model_validate_json(path.read_bytes())
        history = tuple(_operation(item) for item in file.operations)
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror}): give a file that `hybridspec fuzz` wrote"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise BundleError(
            f"{path} is not a history of `hybridspec fuzz`: {place}: {first['msg']}; give a file "
            "that this version wrote"
        ) from None
    except ValueError as error:
        raise BundleError(
            f"{path} is not a history of `hybridspec fuzz`: {error}: give a file that it wrote"
        ) from None
    return Finding(
        Setting(
            file.engine,
            file.dtype,
            file.target_digest,
            file.drafter_digest,
            file.max_requests,
            file.max_context,
        ),
        file.found_by.seed,
        file.found_by.history,
        history,
        Violation(**file.violation.model_dump()),
        file.found_by.minimal,
    )


def _finite(difference: float | None) -> float | None:
    return difference if difference is not None and abs(difference) < float("inf") else None


def _as_json(operation: Operation) -> dict[str, object]:
    match operation:
        case Join():
            full = {
                "do": "join",
                "request": operation.key,
                "prompt": list(operation.prompt),
                "follows": operation.follows,
                "temperature": operation.temperature,
                "seed": operation.seed,
            }
            if operation.follows is None:
                del full["follows"]
            if operation.temperature == 0.0:
                del full["temperature"], full["seed"]
            return full
        case Step():
            plans = [{"request": key, **vars(plan)} for key, plan in operation.plans.items()]
            return {"do": "step", "plans": plans}
        case Leave():
            return {"do": "abort" if operation.aborted else "leave", "request": operation.key}


def _operation(item: _Join | _Step | _Leave) -> Operation:
    match item:
        case _Join():
            return Join(item.request, tuple(item.prompt), item.follows, item.temperature, item.seed)
        case _Step():
            plans = {plan.request: Plan(plan.rows, plan.right, plan.dropped) for plan in item.plans}
            return Step(plans)
        case _Leave():
            return Leave(item.request, aborted=item.do == "abort")
