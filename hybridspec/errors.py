"""Refusals that a user can cause: one clear line each, with a documented exit code.

Exit codes: 0 ok, 1 bug, 2 usage, 3 refused, 4 environment, 5 quality gate, 130 interrupted (143 by
SIGTERM).
"""

from __future__ import annotations


class HybridSpecError(Exception):
    """Base of every expected refusal. The message says value, rule and remedy.

    The command line prints it as one line without a traceback and exits with `exit_code`.
    """

    exit_code = 3


class UsageError(HybridSpecError):
    """A flag, prompt or request that cannot be right whatever the machine."""

    exit_code = 2


class PromptError(UsageError):
    """A prompt (or a set of prompts) that cannot be decoded from."""


class ModelError(HybridSpecError):
    """A model folder that is missing, damaged or of another kind; a drafter of another target."""


class BundleError(HybridSpecError):
    """A bundle or trace that is damaged, incomplete, of another schema or of another identity."""


class EnvironmentMissing(HybridSpecError):
    """What the command needs from the machine is not there (port, device, package, disk space)."""

    exit_code = 4


class EngineRefusal(HybridSpecError):
    """A release or a flag of a serving engine that cannot be used with HybridSpec."""


class NotEnoughData(HybridSpecError):
    """Too few samples to fit or measure what was asked for."""

    exit_code = 5


class QualityGate(HybridSpecError):
    """A fit or measurement is too noisy or too wrong to be used."""

    exit_code = 5


class Interrupted(HybridSpecError):
    """The person stopped the command; the message says what was kept and how to go on."""

    exit_code = 130
