"""Turns pydantic's findings about a request body into one clear OpenAI error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from hybridspec.server.api_error import ApiError, bad_request
from hybridspec.server.protocol import HybridSpecOptions

_SHOWN_CHARS = 60
_PREFIX = "Input should be "


def explain(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the 400 that tells about the first wrong parameter.

    Args:
        errors: `ValidationError.errors()`, locations with or without a leading `body`.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it cannot be parsed")
        return bad_request(
            f"the body is not JSON ({reason}); requests are JSON objects: send one", code="not_json"
        )
    field = _location(first)[:1]
    if not field:
        return bad_request(
            f"the body is {_shown(first['input'])}; it must be a JSON object sent with "
            "Content-Type: application/json",
            code="not_json",
        )
    # A union reports every branch: the deepest finding is the one that the client meant.
    same_field = [error for error in errors if _location(error)[:1] == field]
    depth = max(len(_location(error)) for error in same_field)
    deepest = [error for error in same_field if len(_location(error)) == depth]
    error = deepest[0]
    param = _name(_location(error))
    match error["type"]:
        case "value_error":
            return bad_request(str(error["ctx"]["error"]), param=param)
        case "missing":
            return bad_request(f"{param} is missing; it is required: add it", param=param)
        case "extra_forbidden":
            return bad_request(
                f"{param} is no known parameter; unknown ones are refused because they might be "
                f"meant to change the output: {_instead(param)}",
                param=param,
                code="unknown_parameter",
            )
    rules = dict.fromkeys(str(other["msg"]).removeprefix(_PREFIX) for other in deepest)
    return bad_request(
        f"{param} = {_shown(error['input'])}; it must be {' or '.join(rules)}: correct it",
        param=param,
    )


def _instead(param: str) -> str:
    """What to do about an unknown parameter: a near one of ours, or leave it out."""
    if param.split(".")[0] == "custom_params":
        return 'that is how SGLang is asked; here lengths are asked for in {"hybridspec": {...}}'
    parent, _, name = param.rpartition(".")
    near = difflib.get_close_matches(name, HybridSpecOptions.model_fields, n=1, cutoff=0.6)
    if parent == "hybridspec" and near:
        return f"did you mean {parent}.{near[0]}?"
    return "leave it out"


def _location(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Path of a finding without `body` and without the names of union branches."""
    path = tuple(error["loc"])
    if path[:1] == ("body",):
        path = path[1:]
    return tuple(
        step for step in path if isinstance(step, int) or not (step == "str" or "[" in step)
    )


def _name(location: Sequence[str | int]) -> str:
    name = ""
    for step in location:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
