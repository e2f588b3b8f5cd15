"""HybridSpec's GDN kernels as methods, with tuning variants from the command line."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gdn.method import Method, Round
from gdn.workload import Workload

FAMILY = "hybridspec.kernels.gdn"
VERIFY = {
    "block": ("block", "verify_block"),
    "sequential": ("sequential", "verify_sequential"),
    "dispatch": ("dispatch", "verify"),
}
DEPENDENT = "-pdl"
LAZY = "lazy"


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{FAMILY}.{module}"), name)


class FactorRound(Round):
    """Verify that writes factors, and one commit of all layers from them.

    There is a row of factors for each slot, which serves kernels that index factors by batch row
    and kernels that index them by slot.
    """

    def __init__(
        self,
        workload: Workload,
        form: str,
        *,
        dependent_launch: bool,
        verify_tuning: Mapping[str, Any],
        commit_tuning: Mapping[str, Any],
    ) -> None:
        super().__init__(workload)
        case, shape = workload.case, workload.case.shape
        self.verify_kernel = _function(*VERIFY[form])
        self.commit_kernel = _function("commit", "commit")
        self.verify_options = {"dependent_launch": dependent_launch, **verify_tuning}
        self.commit_options = {"dependent_launch": dependent_launch, **commit_tuning}
        self.factors = _function("factors", "Factors").allocate(
            shape.layers,
            case.slots,
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            device=workload.device,
        )
        self.out_XBTHV = torch.empty(
            (shape.layers, case.batch, case.tokens, shape.value_heads, shape.value_dim),
            dtype=torch.bfloat16,
            device=workload.device,
        )

    def poison(self) -> None:
        self.out_XBTHV.fill_(float("nan"))
        for value in vars(self.factors).values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(float("nan"))

    def verify_layer(self, index: int, layer: int) -> None:
        w = self.workload
        self.verify_kernel(
            w.mixed_NXBTC[index, layer],
            w.a_NXBTH[index, layer],
            w.b_NXBTH[index, layer],
            w.A_log_XH[layer],
            w.dt_bias_XH[layer],
            w.state_XSHVK[layer],
            w.slots_NB[index],
            w.lengths_B,
            self.factors,
            layer,
            self.out_XBTHV[layer],
            key_heads=w.case.shape.key_heads,
            **self.verify_options,
        )

    def output_BTHV(self, index: int, layer: int) -> torch.Tensor:
        del index
        return self.out_XBTHV[layer]

    def commit(self, index: int) -> None:
        w = self.workload
        self.commit_kernel(
            w.state_XSHVK, w.slots_NB[index], w.accepted_B, self.factors, **self.commit_options
        )


class LazyRound(FactorRound):
    """Verify that folds the last round's accepted rows first; a commit only moves cursors.

    Every slot set has cursors of its own and two rows of factors a request.
    """

    def __init__(
        self,
        workload: Workload,
        form: str,
        *,
        dependent_launch: bool,
        verify_tuning: Mapping[str, Any],
        commit_tuning: Mapping[str, Any],
    ) -> None:
        super().__init__(
            workload,
            form,
            dependent_launch=dependent_launch,
            verify_tuning=verify_tuning,
            commit_tuning=commit_tuning,
        )
        case, shape = workload.case, workload.case.shape
        sets = len(workload.slots_NB)
        self.factors_N = [
            _function("factors", "Factors").allocate(
                shape.layers,
                2 * case.batch,
                shape.key_heads,
                shape.value_heads,
                shape.key_dim,
                shape.value_dim,
                device=workload.device,
            )
            for _ in range(sets)
        ]
        pending = _function("pending", "Pending")
        self.pending_N = [pending.allocate(case.batch, device=workload.device) for _ in range(sets)]

    def poison(self) -> None:
        super().poison()
        for index, pending in enumerate(self.pending_N):
            pending.count_B.zero_()
            self.factors = self.factors_N[index]
            super().poison()

    def verify_layer(self, index: int, layer: int) -> None:
        self.factors = self.factors_N[index]
        self.verify_options["pending"] = self.pending_N[index]
        super().verify_layer(index, layer)

    def commit(self, index: int) -> None:
        w = self.workload
        _function("pending", "advance")(self.pending_N[index], w.slots_NB[index], w.accepted_B)

    def settle(self, index: int) -> None:
        w = self.workload
        _function("pending", "flush")(
            w.state_XSHVK, w.slots_NB[index], self.factors_N[index], self.pending_N[index]
        )


@dataclass(frozen=True)
class Ours(Method):
    """One form of our verify with our commit.

    Attributes:
        form: key of `VERIFY`.
        dependent_launch: programmatic dependent launch of verify and commit.
        lazy: the next verify commits (block form only).
        verify_tuning, commit_tuning: keyword arguments handed on as they are.
    """

    form: str = "dispatch"
    dependent_launch: bool = False
    lazy: bool = False
    verify_tuning: Mapping[str, Any] = field(default_factory=dict)
    commit_tuning: Mapping[str, Any] = field(default_factory=dict)

    def missing(self) -> str | None:
        for module, name in (VERIFY[self.form], ("commit", "commit"), ("factors", "Factors")):
            try:
                _function(module, name)
            except (ImportError, AttributeError) as error:
                return str(error)
        return None

    def prepare(self, workload: Workload) -> Round:
        return (LazyRound if self.lazy else FactorRound)(
            workload,
            self.form,
            dependent_launch=self.dependent_launch,
            verify_tuning=self.verify_tuning,
            commit_tuning=self.commit_tuning,
        )


def ours() -> list[Method]:
    """The shipped forms. Add a variant here, or with `--try` for one run."""
    made: list[Method] = []
    for form in VERIFY:
        text = "picked by the measured table" if form == "dispatch" else f"{form} verify"
        made.append(Ours(form, f"ours: {text}, one-launch commit", form))
        made.append(
            Ours(
                form + DEPENDENT,
                f"ours: {text}, one-launch commit, dependent launch",
                form,
                dependent_launch=True,
            )
        )
    for suffix, dependent in (("", False), (DEPENDENT, True)):
        text = "lazy commit in the next block verify" + (", dependent launch" if dependent else "")
        made.append(
            Ours(f"{LAZY}{suffix}", f"ours: {text}", "block", dependent_launch=dependent, lazy=True)
        )
    return made


def parse_variant(text: str) -> Method:
    """`FORM[-pdl][:KEY=VALUE,...][/KEY=VALUE,...]`; after the slash are the commit's arguments.

    Values are integers, `true`, `false` or strings:
    `block-pdl:value_block=16,warps=2/value_block=32`.
    """
    verify_part, _, commit_part = text.partition("/")
    name, _, verify_arguments = verify_part.partition(":")
    form = name.removesuffix(DEPENDENT)
    lazy = form == LAZY
    if form not in (*VERIFY, LAZY):
        raise ValueError(f"variant {text!r}: {form!r} is none of {', '.join((*VERIFY, LAZY))}")
    return Ours(
        text,
        f"ours: variant {text}",
        "block" if lazy else form,
        lazy=lazy,
        dependent_launch=name.endswith(DEPENDENT),
        verify_tuning=_arguments(verify_arguments),
        commit_tuning=_arguments(commit_part),
    )


def _arguments(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"argument {part!r} is not KEY=VALUE")
        words = {"true": True, "false": False}
        found[key] = words[value] if value in words else int(value) if _is_int(value) else value
    return found


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdigit()
