"""Writes down what the ops of a target gave during a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracles.drive import Drive, Target

OPS = ("hyper_pre", "hyper_post", "query", "key_value", "index_select", "attention", "output", "route", "moe")


@dataclass(frozen=True)
class Halves:
    """What one layer did: streams before, between and after its halves, and results by name.

    The names are those of ``official.Straight``; ``entries`` and ``selected`` only where there are any.
    """

    before: Tensor
    between: Tensor
    after: Tensor
    first: dict[str, Tensor]
    second: dict[str, Tensor]


def record(target: Target, tokens: list[int]) -> list[Halves]:
    """Run a prompt in one chunk; what every layer did."""
    calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in OPS}

    def watch(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **how: Any) -> Any:
            calls[name].append((args, plain(*args, **how)))
            return calls[name][-1][1]

        return watched

    drive = Drive(target, 1, len(tokens))
    for name in OPS:  # an instance attribute hides the method until it is deleted
        setattr(target.ops, name, watch(name, getattr(target.ops, name)))
    try:
        drive.step([(0, 0, tokens)])
    finally:
        for name in OPS:
            delattr(target.ops, name)
    selections = iter(calls["index_select"])
    return [_layer(i, calls, drive, selections) for i in range(len(drive.memory.layers))]


def _layer(i: int, calls: dict[str, list[tuple[Any, Any]]], drive: Drive, selections: Any) -> Halves:
    (before_args, before), (between_args, between) = calls["hyper_pre"][2 * i : 2 * i + 2]
    first = {
        "x": before[0],
        "q": calls["query"][i][1],
        "kv": calls["key_value"][i][1],
        "attention": calls["attention"][i][1],
        "f": calls["output"][i][1],
    }
    entries = drive.memory.layers[i].entries
    if entries is not None:
        n, ratio = first["x"].shape[0], drive.target.config.compress_ratios[i]
        first["entries"] = entries.entries[drive.memory.page_table[0]].flatten(0, 1)[: n // ratio]
        if drive.memory.layers[i].index is not None:
            first["selected"] = as_mask(next(selections)[1], n // ratio)
    ids, weights = calls["route"][i][1]
    second = {"x": between[0], "ids": ids, "weights": weights, "f": calls["moe"][i][1]}
    return Halves(before_args[0], between_args[0], calls["hyper_post"][2 * i + 1][1], first, second)


def as_mask(selection: Tensor, entries: int) -> Tensor:
    """Entry indices [n, k] padded with -1 as bool [n, entries]."""
    mask = torch.zeros(selection.shape[0], entries + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(selection < 0, entries, selection), True)
    return mask[:, :entries]
