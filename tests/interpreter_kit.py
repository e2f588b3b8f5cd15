"""Triton's interpreter, made faster for tests: a third less time and the same results."""

from __future__ import annotations

import inspect
import sys
from typing import Any


def remember_builtins() -> None:
    """Let the interpreter look for a module's builtins once.

    It does so before every kernel and before every call of one jitted function by another, through
    all members of `triton.language`. Which names are builtins never changes, only whether they are
    in place: those that are remapped already are no builtins, and are left as they are.

    Does nothing where the interpreter is not imported, or is of a version without this function.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    patch_all = getattr(interpreter, "_patch_builtin", None)
    if patch_all is None or getattr(patch_all, "remembers", False):
        return
    is_builtin = interpreter.tl.core.is_builtin
    # The module or class is kept with its names, so that its id stays its own.
    known: dict[int, tuple[Any, list[str]]] = {}

    def patch_remembered(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in known:
            names = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
            known[id(package)] = package, names
        for name in known[id(package)][1]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    patch_remembered.remembers = True  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_remembered
