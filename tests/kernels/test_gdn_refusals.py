"""What the GDN kernels refuse: the message says the value, the rule and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from gdn_cases import BF16, FORMS, Case, int32

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors


def call(case: Case, form: str) -> None:
    FORMS[form](
        *case.inputs.tensors(),
        case.state_SHVK,
        case.slots_B,
        case.lengths_B,
        case.factors,
        case.layer,
        case.out_BTHV,
        key_heads=case.inputs.key_heads,
    )


Change = Callable[[torch.Tensor], torch.Tensor]


def with_inputs(name: str, change: Change) -> Callable[[Case], None]:
    return lambda case: setattr(case.inputs, name, change(getattr(case.inputs, name)))


def with_case(name: str, change: Change) -> Callable[[Case], None]:
    return lambda case: setattr(case, name, change(getattr(case, name)))


def with_factors(*shape: int) -> Callable[[Case], None]:
    return lambda case: setattr(
        case, "factors", Factors.allocate(*shape, device=case.state_SHVK.device)
    )


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """Same values, the last dimension strided."""
    wide = torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


VERIFY = {
    "fp32 rows": (with_inputs("mixed_BTC", torch.Tensor.float), "torch.float32.*bfloat16"),
    "strided channels": (with_inputs("mixed_BTC", interleaved), "contiguous channels"),
    "narrow rows": (with_inputs("mixed_BTC", lambda x: x[..., 1:]), "511 wide.*512"),
    "17 rows": (
        with_inputs("mixed_BTC", lambda x: x.repeat(1, 5, 1)[:, :17]),
        "17 rows.*1 to 16.*split",
    ),
    "no rows": (with_inputs("mixed_BTC", lambda x: x[:, :0]), "0 rows.*1 to 16"),
    "gates of other heads": (with_inputs("a_BTH", lambda x: x[..., :2]), r"a has shape"),
    "strided gates": (with_inputs("b_BTH", interleaved), "b has shape.*contiguous heads"),
    "short parameters": (with_inputs("A_log_H", lambda x: x[:3]), r"A_log.*\(3,\).*\(4,\)"),
    "strided parameters": (with_inputs("dt_bias_H", interleaved), "dt_bias.*contiguous"),
    "head counts": (lambda case: setattr(case.inputs, "key_heads", 3), "4 value heads over 3"),
    "fp16 state": (with_case("state_SHVK", torch.Tensor.half), "torch.float16.*float32 or"),
    "transposed state": (with_case("state_SHVK", lambda x: x.mT), "strides.*contiguous"),
    "head dim": (
        with_case("state_SHVK", lambda x: x[..., :32]),
        r"K = 32, V = 64.*\(64, 128\)",
    ),
    "int64 slots": (with_case("slots_B", torch.Tensor.long), "slots is torch.int64.*int32"),
    "lengths of others": (with_case("lengths_B", lambda x: x[:1]), r"lengths is.*\(1,\).*\(2,\)"),
    "strided lengths": (with_case("lengths_B", interleaved), "lengths is.*contiguous"),
    "output shape": (with_case("out_BTHV", lambda x: x[:, :3]), "out has shape"),
    "strided output": (with_case("out_BTHV", interleaved), "out has shape.*contiguous channels"),
    "fp16 output": (with_case("out_BTHV", torch.Tensor.half), "out is torch.float16.*bfloat16"),
    "few factor rows": (with_factors(2, 1, 2, 4, 64, 64), "hold 1 rows.*largest batch"),
    "factors of other value heads": (with_factors(2, 2, 2, 3, 64, 64), "3 value heads"),
    "factors of other key heads": (with_factors(2, 2, 1, 4, 64, 64), "1 key heads.*of 2"),
    "factors of other keys": (with_factors(2, 2, 2, 4, 128, 64), "128"),
    "factors of other values": (with_factors(2, 2, 2, 4, 64, 128), "128"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", VERIFY)
def test_verify_refuses(device, form, name):
    case = Case.make(device, 4, [4, 2], key_heads=2, value_heads=4)
    spoil, message = VERIFY[name]
    spoil(case)
    before = case.out_BTHV.clone()
    with pytest.raises(UsageError, match=message):
        call(case, form)
    assert torch.equal(case.out_BTHV.isnan(), before.isnan())


@pytest.mark.parametrize("form", FORMS)
def test_verify_refuses_a_value_block_that_does_not_divide(device, form):
    case = Case.make(device, 4, [4, 2])
    with pytest.raises(UsageError, match="128"):
        case.run(FORMS[form], value_block=128)


@dataclasses.dataclass
class Arguments:
    state: torch.Tensor
    slots: torch.Tensor
    accepted: torch.Tensor
    factors: Factors
    windows: ConvWindows | None = None


def windows(device: torch.device, layers: int = 2, rows: int = 2, channels: int = 8) -> ConvWindows:
    return ConvWindows(
        torch.zeros(2, 3, 8, 3, dtype=BF16, device=device),
        torch.zeros(layers, rows, 4, channels, dtype=BF16, device=device),
    )


def factors(device: torch.device, *shape: int) -> Factors:
    return Factors.allocate(*shape, device=device)


COMMIT = {
    "fp16 state": (lambda a, d: {"state": a.state.half()}, "torch.float16.*float32 or"),
    "transposed state": (lambda a, d: {"state": a.state.mT}, "strides.*contiguous"),
    "layers": (lambda a, d: {"state": a.state[:1]}, "1 layers.*2 layers"),
    "value heads": (lambda a, d: {"factors": factors(d, 2, 2, 2, 8, 64, 64)}, "8.*heads"),
    "key dim": (lambda a, d: {"factors": factors(d, 2, 2, 2, 4, 128, 64)}, "128"),
    "value dim": (lambda a, d: {"factors": factors(d, 2, 2, 2, 4, 64, 128)}, "128"),
    "factor rows": (lambda a, d: {"factors": factors(d, 2, 1, 2, 4, 64, 64)}, "1 rows"),
    "int64 slots": (lambda a, d: {"slots": a.slots.long()}, "slots is torch.int64"),
    "accepted": (lambda a, d: {"accepted": a.accepted[:1]}, r"accepted is.*\(1,\)"),
    "strided accepted": (lambda a, d: {"accepted": interleaved(a.accepted)}, "contiguous"),
    "window layers": (lambda a, d: {"windows": windows(d, layers=1)}, "conv windows"),
    "window rows": (lambda a, d: {"windows": windows(d, rows=1)}, "conv windows"),
    "window channels": (lambda a, d: {"windows": windows(d, channels=7)}, "conv windows"),
}


@pytest.mark.parametrize("name", COMMIT)
def test_commit_refuses(device, name):
    arguments = Arguments(
        torch.zeros(2, 3, 4, 64, 64, device=device),
        int32([1, 2], device),
        int32([1, 2], device),
        factors(device, 2, 2, 2, 4, 64, 64),
    )
    change, message = COMMIT[name]
    a = dataclasses.replace(arguments, **change(arguments, device))
    with pytest.raises(UsageError, match=message):
        commit(a.state, a.slots, a.accepted, a.factors, windows=a.windows)


def test_commit_refuses_a_value_block_that_does_not_divide(device):
    state = torch.zeros(1, 2, 1, 64, 64, device=device)
    slots = int32([1], device)
    with pytest.raises(UsageError, match="128"):
        commit(state, slots, slots, factors(device, 1, 1, 1, 1, 64, 64), value_block=128)


def test_factors_refuse_other_types_sizes_and_strides():
    f = Factors.allocate(1, 2, 1, 2, 64, 64, device="cpu")
    parts = {"key_XRHTK": f.key_XRHTK, "update_XRHTV": f.update_XRHTV, "decay_XRHT": f.decay_XRHT}
    for name, value, message in (
        ("key_XRHTK", f.key_XRHTK.float(), "torch.float32.*bfloat16"),
        ("update_XRHTV", f.update_XRHTV.to(BF16), "drifts"),
        ("decay_XRHT", f.decay_XRHT.double(), "float64"),
        ("key_XRHTK", f.key_XRHTK[:, :, :, :8], "8 block rows.*16"),
        ("update_XRHTV", interleaved(f.update_XRHTV), "contiguous"),
    ):
        with pytest.raises(UsageError, match=message):
            Factors(**{**parts, name: value})


def test_bytes_of_factors_at_the_full_shape():
    """4 KiB of keys, 16 KiB of updates and 128 bytes of decays a row and layer."""
    one = Factors.allocate(1, 1, 16, 32, 128, 128, device="meta")
    assert one.bytes() == BLOCK_ROWS * (4096 + 16384 + 128)
    assert Factors.allocate(30, 4, 16, 32, 128, 128, device="meta").bytes() == 120 * one.bytes()
    assert one.layers == 1
