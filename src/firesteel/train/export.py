"""A trained model to a folder in the official layout, and back.

    python -m firesteel.train.export --weights FILE --tokenizer FILE --out DIR

A drafter's state also needs ``--target DIR``, the folder of its target.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from firesteel.checkpoint.codecs import QTensor
from firesteel.checkpoint.reader import Checkpoint
from firesteel.config import ParameterError
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.layout import expected_tensors, open_checkpoint, write_official
from firesteel.train.attention import Linear8, Numerics
from firesteel.train.drafter import DrafterTrain
from firesteel.train.model import Experts, V4Train

FLOAT32_ENDS = ("_fn", "_base", "_scale", ".ape", ".attn_sink", "gate.bias")
SHARD_BYTES = 15_000_000


def named_weights(model: nn.Module) -> dict[str, QTensor | Tensor]:
    """Official tensor name -> stored value, on the CPU."""
    out: dict[str, QTensor | Tensor] = {}
    eights = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Linear8)}
    stacks = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, Experts))
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if name.startswith(stacks):
            prefix, which = name.rsplit(".", 1)
            for e, one in enumerate(value):
                out[f"{prefix}.{e}.{which}.weight"] = QTensor.fp4(one)
        elif name in eights:
            out[name] = QTensor.fp8(value)
        elif name.endswith("tid2eid"):
            out[name] = value
        elif name.endswith(FLOAT32_ENDS):
            out[name] = value.float()
        else:
            out[name] = value.bfloat16()
    return out


def ordered(cfg: V4Config, weights: dict[str, QTensor | Tensor]) -> Iterator[tuple[str, QTensor | Tensor]]:
    """All tensors of ``cfg`` in the official order; a missing or surplus one is our bug."""
    names = [n for n in expected_tensors(cfg, drafter=cfg.dspark is not None) if not n.endswith(".scale")]
    assert set(names) == set(weights), set(names) ^ set(weights)
    for name in names:
        yield name, weights[name]


def export(model: V4Train, folder: Path, tokenizer: Path | None, drafter: DrafterTrain | None = None) -> Path:
    """Write config.json, shards, index and tokenizer.json into an empty ``folder``.

    With ``drafter`` also its ``mtp.*`` tensors and ``dspark_*`` fields.
    """
    cfg = replace(model.cfg, dspark=None, mtp_stages=0)
    weights = named_weights(model)
    if drafter is not None:
        cfg = replace(cfg, dspark=drafter.draft, mtp_stages=drafter.draft.stages)
        weights |= named_weights(drafter)
    extras = [tokenizer] if tokenizer is not None else []
    write_official(
        folder, cfg, ordered(cfg, weights), one_file_per_layer=False, shard_bytes=SHARD_BYTES,
        extra_files=extras,
    )  # fmt: skip
    settings = {
        "bos_token_id": cfg.bos_token_id, "do_sample": True, "eos_token_id": cfg.eos_token_id,
        "temperature": 1.0, "top_p": 1.0,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def stored_bytes(*models: nn.Module) -> int:
    """Bytes of weights that exporting ``models`` would write."""
    parts = (value for model in models for value in named_weights(model).values())
    return sum(v.nbytes if isinstance(v, QTensor) else v.numel() * v.element_size() for v in parts)


def fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Dequantised values of a checkpoint into a model of official names.

    Quantising them again gives the same values, so the model computes what it did before export.
    """
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if ".ffn.experts." in name:
                prefix, which = name.rsplit(".", 1)
                parts = [checkpoint.qtensor(f"{prefix}.{e}.{which}").dequant() for e in range(len(target))]
                target.copy_(torch.stack(parts))
            elif name.endswith("tid2eid"):
                target.copy_(checkpoint.tensor(name))
            else:
                target.copy_(checkpoint.qtensor(name.removesuffix(".weight")).dequant())


def load(folder: Path, num: Numerics, device: str = "cpu") -> V4Train:
    """The target of an exported folder."""
    cfg = V4Config.load(folder)
    model = V4Train(cfg, num)
    with open_checkpoint(folder, cfg, drafter=False) as checkpoint:
        fill(model, checkpoint)
    return model.to(device)


def load_drafter(folder: Path, num: Numerics, device: str = "cpu") -> DrafterTrain:
    """The drafter of an exported folder; raises ParameterError if it has none."""
    cfg = V4Config.load(folder)
    if cfg.dspark is None:
        raise ParameterError(f"{folder} has no drafter; train one with firesteel train drafter")
    with open_checkpoint(folder, cfg) as checkpoint:
        layout = checkpoint.layout
        if layout is None or not layout.confidence_head:
            cfg = replace(cfg, dspark=replace(cfg.dspark, confidence_head=False))
        model = DrafterTrain(cfg, num)
        fill(model, checkpoint)
    return model.to(device)


def main(argv: Sequence[str] | None = None) -> None:
    """Export the model of a training state."""
    args = argparse.ArgumentParser(prog="firesteel train export", description="training state to folder")
    args.add_argument("--weights", type=Path, required=True, help="state.pt of a target or drafter run")
    args.add_argument("--target", type=Path, help="folder of the target; needed for a drafter's state")
    args.add_argument("--tokenizer", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    opt = args.parse_args(argv)
    state = torch.load(opt.weights, map_location="cpu", weights_only=True)
    cfg = V4Config.from_dict(state["config"], str(opt.weights))
    if cfg.dspark is None:
        model = V4Train(cfg, Numerics())
        model.load_state_dict(state["model"])
        export(model, opt.out, opt.tokenizer)
        return
    if opt.target is None:
        raise ParameterError("--target: a drafter's state is exported together with its target's folder")
    drafter = DrafterTrain(cfg, Numerics())
    drafter.load_state_dict(state["model"])
    export(load(opt.target, Numerics()), opt.out, opt.tokenizer, drafter)


if __name__ == "__main__":
    main()
