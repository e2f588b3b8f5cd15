"""What a round teaches: a request's history, its own rate, and why the policy fell back."""

from __future__ import annotations

from hybridspec.hazards import RequestHistory
from hybridspec.policy import Policy, Selection
from hybridspec.reference.sequence import Request
from hybridspec.request import Round


def history_of(request: Request, policy: Policy) -> RequestHistory | None:
    """The request's history for the policy's hazards, from its first emitted token on.

    Begun at its first drafted round or whenever another model took over: the text is known then,
    and no earlier round was drafted for this model.
    """
    if request.history_model is not policy.hazard_model:
        request.history_model = policy.hazard_model
        emitted = request.tokens[request.num_prompt_tokens :]
        request.history = policy.hazard_model.start(emitted)
    return request.history


def learn(
    policy: Policy,
    request: Request,
    outcome: Round,
    selection: Selection | None,
    *,
    row: int | None,
    batch_size: int,
) -> None:
    """Fill in a round's predicted time and fall-back; let its request learn from it.

    Args:
        row: the request's in `selection`; None for a round that the policy did not select.
    """
    plain_us, drafted_us = policy.latency(batch_size, request.context_tokens)
    length = outcome.verify_length
    outcome.predicted_us = plain_us if length == 0 else float(drafted_us[length - 1])
    if request.history is not None:
        request.history.observe(outcome.emitted, accepted=outcome.accepted, verify_length=length)
    if request.rule.kind != "policy" or request.switch is None:
        return
    if row is None or selection is None:
        outcome.fallback = "drafting does not pay for this request"
        request.switch.after_plain()
        return
    outcome.fallback = selection.fallback[row]
    if outcome.fallback is None:
        expected = float(selection.expected_BL[row][length - 1])
        request.switch.after_draft(expected, len(outcome.emitted), outcome.predicted_us, plain_us)
