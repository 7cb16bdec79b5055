"""Counter-based uniforms: every random number is a pure function of (request seed, position, purpose).

A session that is rebuilt on another replica, or a call that is retried, therefore continues with the same numbers.
Each number decides at most one committed thing: ACCEPT and TARGET numbers are keyed by the absolute position they
decide; DRAFT numbers also by the anchor's position (`stream`) and the denoising step, so that a position drafted
again in a later round gets a fresh number.
"""

from __future__ import annotations

import secrets
import threading
from enum import IntEnum
from typing import Any, cast

import numpy as np

from specdiff_dist.core.rows import FloatArray

_MASK64 = (1 << 64) - 1
_thread = threading.local()  # one bit generator each: making one takes longer than the numbers of a round


class Purpose(IntEnum):
    """What a uniform decides."""

    DRAFT = 1  # which token the drafter draws
    ACCEPT = 2  # whether a draft token is accepted
    TARGET = 3  # which token is drawn from the residual (recovered) or from the target row (bonus, plain)


def uniforms(seed: int, purpose: Purpose, start: int, count: int, *, stream: int = 0, step: int = 0) -> FloatArray:
    """Uniforms in [0, 1), float64 [count], for positions start … start+count-1. One Philox block per position."""
    philox = _thread.__dict__.get("philox")
    if philox is None:
        philox = _thread.philox = np.random.Philox(0)
    philox.state = cast(Any, {
        "bit_generator": "Philox",
        "state": {"key": (seed & _MASK64, (seed >> 64) & _MASK64), "counter": (start, stream, step, int(purpose))},
        "buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0,  # nothing left over from before
    })  # fmt: skip
    return cast(FloatArray, (philox.random_raw(4 * count)[::4] >> 11) * 2.0**-53)


def fresh_seed() -> int:
    """A seed for a request that brought none: 63 bits from the operating system, never shared between replicas."""
    return secrets.randbits(63)
