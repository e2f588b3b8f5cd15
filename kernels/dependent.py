"""The wait of a programmatic dependent launch, for kernels whose inputs are all of one kind."""

# The device side of triton is not in its annotations.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Return once everything before this kernel has been written; the next one may set up then."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
