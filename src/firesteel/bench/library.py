"""The vendor's library beside our products: cuBLASLt through torch, on the operands of a step's own calls.

FP8 weights are multiplied with one scale per operand, the library's fastest form, which computes less than
ours (theirs has a scale per block of 128 by 128). Only what the library has: plain and grouped products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("linear", "linear_f32", "logits", "head_sample", "output")


def same_products(name: str, args: Sequence[Any]) -> list[Callable[[], Any]] | None:
    """The products of one op call as calls of the library; None where it has no such product.

    ``name``: of the op; ``args`` its arguments, activations [R, K] and prepared weights [N, K].
    """
    if name not in PRODUCTS or args[0].device.type == "cpu":
        return None
    x, weight = args[0], args[1]
    if name != "output":
        one = _product(x, getattr(weight, "data", None))
        return None if one is None else [one]
    groups, last = args[1], args[2]
    low = _groups(x.flatten(1), [getattr(w.data, "data", None) for w in groups])
    middle = x.new_zeros(x.shape[0], last.k)
    second = _product(middle, last.data)
    return None if low is None or second is None else [low, second]


def _product(x: Tensor, weight: Any) -> Callable[[], Any] | None:
    """x [R, K] times a weight of ``ops.triton.linear.Weight``'s form."""
    data = getattr(weight, "data", None)
    if not isinstance(data, Tensor) or data.dim() != 2 or x.shape[1] != data.shape[1]:
        return None
    if data.dtype == torch.float8_e4m3fn:
        q, one = x.float().clamp(-448, 448).to(data.dtype), torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(q, data.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    narrow, operand = x.to(torch.bfloat16), data.to(torch.bfloat16)
    return lambda: narrow @ operand.t()


def _groups(x: Tensor, parts: Sequence[Any]) -> Callable[[], Any] | None:
    """Every group's columns of x [R, groups * K] times its own weight [N, K]."""
    if not all(isinstance(p, Tensor) and p.dim() == 2 for p in parts):
        return None
    weights = torch.stack([p.to(torch.bfloat16) for p in parts]).transpose(1, 2)
    own = x.to(torch.bfloat16).unflatten(1, (len(parts), -1)).transpose(0, 1).contiguous()
    return lambda: torch.bmm(own, weights)
