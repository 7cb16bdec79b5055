"""Matrices laid out once for the few rows of a verify call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]  # [n, in] -> [n, out]

_FEW_ROWS = 8  # the batch that oneDNN chooses the layout for; it serves 1 … 32 rows about equally
_MANY_ROWS = 256  # from here on (a prompt) the plain product is as fast or faster


def make_linear(weight: Tensor) -> Linear:
    """x @ weight.T in the weight's dtype. weight: [out, in].

    On a CPU in float32 the matrix is reordered once into oneDNN's blocked layout. The plain product of 2 … 16 rows
    reorders it anew in every call, which makes the second row cost more than the first (measured: 2.5 times one row for 2
    rows, 3 for 17; packed 1.1 and 2.0). The plain layout is kept beside it only where it is somebody else's anyway.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return lambda x: torch.nn.functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _FEW_ROWS)
    operator = torch.ops.mkldnn._linear_pointwise
    return lambda x: operator(x, packed, None, "none", [], "")
