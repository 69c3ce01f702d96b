"""Engines of a named geometry with random weights made on the device: benchmarks without a checkpoint.

    flash-8L   V4-Flash's widths, its first 8 layers (2 window, 3 CSA, 3 HCA; 3 hash layers), 3 draft stages
    tiny       every kind of layer at toy widths, for the CPU

A weight is a function of (seed, name, shape, device type). FP8 and FP4 codes are drawn directly, in their
checkpoint formats, with power-of-two scales that keep activations near unit size; nothing is dequantised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import FP4_GROUP, FP4_VALUES, QTensor, block_shape
from firesteel.config import EngineConfig, ParameterError
from firesteel.engine.build import Built, assemble, place
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.dspark import Drafter, build_drafter
from firesteel.models.deepseek_v4.layout import TensorSpec, Weight, weights_and_tensors
from firesteel.models.deepseek_v4.model import Target
from firesteel.models.deepseek_v4.presets import flash_dspark
from firesteel.models.deepseek_v4.random_init import Source as HostSource
from firesteel.models.deepseek_v4.random_init import random_tensor, tiny_config
from firesteel.models.deepseek_v4.weights import build_target

LARGE = 1 << 20  # elements from which numbers are drawn on the device
FP8_SPREAD = 64.0  # standard deviation of drawn FP8 values: 448 is seven of them
FP4_SPREAD = math.sqrt(sum(v * v for v in FP4_VALUES) / len(FP4_VALUES))  # of equally likely codes


def flash_8l() -> V4Config:
    """Eight layers of V4-Flash in their real order, and its three draft stages."""
    full = flash_dspark()
    assert full.dspark is not None, "the preset has a drafter"
    return replace(
        full,
        num_hidden_layers=8,
        compress_ratios=full.compress_ratios[:8],
        dspark=replace(full.dspark, target_layer_ids=(5, 6, 7)),
    )


GEOMETRIES: dict[str, Callable[[], V4Config]] = {"flash-8L": flash_8l, "tiny": tiny_config}


def geometry(name: str) -> V4Config:
    """A geometry by name; raises ParameterError listing the known ones."""
    if name not in GEOMETRIES:
        raise ParameterError(f"geometry={name!r}: expected one of {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]()


class _Draws(HostSource):
    """Small tensors as in ``random_init``; large ones drawn on the device."""

    def __init__(self, seed: int, device: torch.device):
        super().__init__(seed)
        self.device = device

    def on_device(self, name: str) -> torch.Generator:
        made = torch.Generator(device=self.device)
        return made.manual_seed(self.generator(name).initial_seed() % (1 << 63))

    def normal(self, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> Tensor:
        if math.prod(shape) < LARGE:
            return super().normal(name, shape, std, mean)
        return torch.randn(shape, generator=self.on_device(name), device=self.device) * std + mean


@dataclass
class RandomWeights:
    """Named tensors of a geometry, drawn when asked for: the ``Source`` of the model builders."""

    config: V4Config
    seed: int
    device: torch.device
    _weights: dict[str, Weight] = field(default_factory=dict)
    _specs: dict[str, TensorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._draws = _Draws(self.seed, self.device)
        for item in weights_and_tensors(self.config):
            if isinstance(item, Weight):
                self._weights[item.prefix] = item
            else:
                self._specs[item.name] = item

    def tensor(self, name: str) -> Tensor:
        """One unquantised tensor by its full name, in its official dtype."""
        return random_tensor(self.config, self._draws, self._specs[name]).to(self.device)

    def qtensor(self, prefix: str) -> QTensor:
        """Weight of module ``prefix`` in its checkpoint format."""
        weight = self._weights.get(prefix)
        if weight is None:
            return QTensor.dense(self.tensor(f"{prefix}.weight"))
        if weight.kind == "expert" and self.config.expert_dtype == "fp4":
            return self._fp4(weight)
        return self._fp8(weight)

    def _fp8(self, w: Weight) -> QTensor:
        gen, shape = self._draws.on_device(w.prefix), (w.rows, w.cols)
        data = (torch.randn(shape, generator=gen, device=self.device) * FP8_SPREAD).clamp(-448, 448)
        scale = self._scale(block_shape(w.rows, w.cols), FP8_SPREAD, w.cols)
        return QTensor("fp8", data.to(torch.float8_e4m3fn), scale, shape)

    def _fp4(self, w: Weight) -> QTensor:
        gen = self._draws.on_device(w.prefix)
        shape = (w.rows, w.cols // 2)
        data = torch.randint(0, 256, shape, generator=gen, device=self.device, dtype=torch.uint8)
        scale = self._scale((w.rows, w.cols // FP4_GROUP), FP4_SPREAD, w.cols)
        return QTensor("fp4", data, scale, (w.rows, w.cols))

    def _scale(self, shape: tuple[int, int], spread: float, cols: int) -> Tensor:
        """E8M0 bytes of the power of two that comes closest to a spread of 1/sqrt(cols)."""
        exponent = round(-math.log2(spread * math.sqrt(cols)))
        return torch.full(shape, 127 + exponent, dtype=torch.uint8, device=self.device)


def build_random(
    name: str | Path | None, settings: EngineConfig, progress: Callable[[str], None] = lambda _: None
) -> Built:
    """An engine of a named geometry; the counterpart of ``build_engine`` for checkpoints."""
    config = geometry(str(name))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    choice, device = place(settings)
    notes = [
        f"random weights of {name}, seed 0",
        f"device: {device}",
        f"ops: {choice.ops.name}",
        f"numerics: {settings.numerics}",
    ]
    notes += [f"ops {other} not used: {why}" for other, why in choice.reasons.items()]
    source = RandomWeights(config, 0, device)
    target = Target(config, build_target(source, config, choice.ops, device, progress), choice.ops)
    drafter, spec = None, settings.speculative
    if spec is not None:
        progress("drafter")
        uses_head = spec.confidence != "none"
        drafter = Drafter(config, build_drafter(source, config, choice.ops, device, uses_head), target)
        notes.append(f"speculation: dspark, K={spec.num_speculative_tokens}, {spec.acceptance} acceptance")
        if spec.simulated_acceptance is not None:
            notes.append(f"SIMULATED acceptance: the text is meaningless; {spec.simulated_acceptance}")
    return assemble(config, settings, target, drafter, Path(str(name)), notes, progress)


def load(model: str | None, progress: Callable[[str], None] = lambda _: None, **settings: Any) -> LLM:
    """A checkpoint folder, the bundled model (None), or a geometry's name with random weights."""
    if model in GEOMETRIES:
        return LLM(model, progress=progress, build=build_random, **settings)
    return LLM(model, progress=progress, **settings)
