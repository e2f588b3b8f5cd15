"""Muon for matrices, AdamW for the rest, and the clock and learning-rate schedule of a stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_NOT_MATRICES = ("embed", "conv1d", "mlp.gate.weight", "shared_expert_gate")
_SMALLEST_SIDE = 8
_WARM_UP_STEPS = 100
_fused: Any = torch  # Operations on lists of tensors have private names only.


def orthogonalise(matrices: Tensor) -> Tensor:
    """Returns matrices [..., rows, columns] with singular values moved towards one."""
    wide = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = wide.shape[-2] > wide.shape[-1]
    if tall:
        wide = wide.transpose(-1, -2)
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in _NEWTON_SCHULZ:
        gram = wide @ wide.transpose(-1, -2)
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    if tall:
        wide = wide.transpose(-1, -2)
    return wide.to(matrices.dtype)


class Muon:
    """Orthogonalised momentum for matrices and expert stacks, AdamW for every other parameter."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, muon_lr: float, adam_lr: float,
        weight_decay: float, momentum: float = 0.95, clip: float = 1.0,
    ) -> None:  # fmt: skip
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.weight_decay, self.momentum, self.clip = weight_decay, momentum, clip
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        others: list[nn.Parameter] = []
        for name, parameter in named:
            shape = parameter.shape
            small = parameter.dim() < 2 or min(shape[-2:]) <= _SMALLEST_SIDE
            if small or any(part in name for part in _NOT_MATRICES):
                others.append(parameter)
            else:
                self.groups.setdefault((shape[-2], shape[-1]), []).append(parameter)
        self.matrices = [p for group in self.groups.values() for p in group]
        self.velocity = {p: torch.zeros_like(p) for p in self.matrices}
        self.parameters = self.matrices + others
        device = others[0].device
        # Rates live on the device, so that a captured step follows the schedule.
        self.rate = torch.ones((), device=device)
        cuda = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            others, lr=torch.tensor(adam_lr, device=device) if cuda else adam_lr,
            betas=(0.9, 0.95), weight_decay=0.0, fused=cuda, capturable=cuda,
        )  # fmt: skip

    def set_rate(self, rate: float) -> None:
        """Sets the share of the learning rates that the next steps use.

        Args:
            rate: value of the schedule, about 0 to 1.
        """
        self.rate.fill_(rate)
        for group in self.adam.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.adam_lr * rate)
            else:
                group["lr"] = self.adam_lr * rate

    @staticmethod
    def _grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    def _clip(self) -> None:
        grads = self._grads(self.parameters)
        norm = torch.stack(_fused._foreach_norm(grads)).norm()
        # One broken batch must not destroy the weights: its step becomes a step of zero gradient.
        factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        _fused._foreach_mul_(grads, factor)
        for grad in grads:
            grad.nan_to_num_(0.0, 0.0, 0.0)

    @torch.no_grad()
    def step(self) -> None:
        """Applies the gradients; they stay allocated and are worthless afterwards."""
        self._clip()
        self.adam.step()
        decay = 1.0 - self.rate * (self.muon_lr * self.weight_decay)
        _fused._foreach_mul_(list(self.matrices), decay)
        for (rows, columns), parameters in self.groups.items():
            velocities = [self.velocity[p] for p in parameters]
            grads = self._grads(parameters)
            _fused._foreach_lerp_(velocities, grads, 1.0 - self.momentum)
            ahead = _fused._foreach_lerp(grads, velocities, self.momentum)
            stacked = torch.cat([u.reshape(-1, rows, columns) for u in ahead])
            length = self.rate * (self.muon_lr * max(1.0, rows / columns) ** 0.5)
            updates = orthogonalise(stacked) * length
            pieces = updates.split([u.numel() // (rows * columns) for u in ahead])
            shaped = [u.view_as(p) for u, p in zip(pieces, parameters, strict=True)]
            _fused._foreach_sub_(list(parameters), shaped)


@dataclass
class StageClock:
    """Decides when a training stage ends: after `steps`, or earlier when its time is up.

    With a time limit the schedule follows whichever of steps and clock is further, so that the
    learning rate has fallen completely when the clock ends the stage.
    """

    steps: int
    limit_s: float | None = None
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def progress(self) -> float:
        """Returns the share of the stage that is done, 0 to 1."""
        by_steps = self.done / self.steps
        by_clock = self.elapsed_s() / self.limit_s if self.limit_s else 0.0
        return min(1.0, max(by_steps, by_clock))

    def rate(self, decay_fraction: float) -> float:
        """Returns the learning-rate factor: short warm-up, flat, then linear to 2 % of the peak.

        The warm-up counts steps, so that time spent on compiling does not eat it.

        Args:
            decay_fraction: share of the stage in which the rate falls.
        """
        warm_up = min(_WARM_UP_STEPS, self.steps // 10 + 1)
        falling = (1.0 - self.progress()) / decay_fraction
        return min(1.0, (self.done + 1) / warm_up) * max(0.02, min(1.0, falling))

    def elapsed_s(self) -> float:
        """Returns seconds since the stage began."""
        return time.monotonic() - self.started

    def eta_s(self) -> float:
        """Returns the seconds that are probably left."""
        progress = max(self.progress(), 1e-6)
        return self.elapsed_s() * (1.0 - progress) / progress
