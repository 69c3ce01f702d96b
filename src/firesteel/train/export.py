"""A trained model to a folder in the official layout, and back.

python -m firesteel.train.export --weights FILE --tokenizer FILE --out DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.layout import expected_tensors, open_checkpoint, write_official
from firesteel.train.attention import Linear8, Numerics
from firesteel.train.model import Experts, V4Train

FLOAT32_ENDS = ("_fn", "_base", "_scale", ".ape", ".attn_sink", "gate.bias")
SHARD_BYTES = 15_000_000


def named_weights(model: V4Train) -> dict[str, QTensor | Tensor]:
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
    """The target's tensors in the official order; a missing or surplus one is our bug."""
    names = [n for n in expected_tensors(cfg, drafter=False) if not n.endswith(".scale")]
    assert set(names) == set(weights), set(names) ^ set(weights)
    for name in names:
        yield name, weights[name]


def export(model: V4Train, folder: Path, tokenizer: Path) -> Path:
    """Write config.json, shards, index and tokenizer.json into an empty ``folder``."""
    extras = [tokenizer]
    tensors = ordered(model.cfg, named_weights(model))
    write_official(
        folder, model.cfg, tensors, one_file_per_layer=False, shard_bytes=SHARD_BYTES, extra_files=extras
    )
    settings = {
        "bos_token_id": model.cfg.bos_token_id, "do_sample": True, "eos_token_id": model.cfg.eos_token_id,
        "temperature": 1.0, "top_p": 1.0,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def load(folder: Path, num: Numerics, device: str = "cpu") -> V4Train:
    """A V4Train holding the dequantised values of an exported folder.

    Quantising them again gives the same values, so the model computes what it did before export.
    """
    cfg = V4Config.load(folder)
    model = V4Train(cfg, num)
    with open_checkpoint(folder, cfg, drafter=False) as checkpoint, torch.no_grad():
        for name, target in model.state_dict().items():
            if ".ffn.experts." in name:
                prefix, which = name.rsplit(".", 1)
                parts = [checkpoint.qtensor(f"{prefix}.{e}.{which}").dequant() for e in range(len(target))]
                target.copy_(torch.stack(parts))
            elif name.endswith("tid2eid"):
                target.copy_(checkpoint.tensor(name))
            else:
                target.copy_(checkpoint.qtensor(name.removesuffix(".weight")).dequant())
    return model.to(device)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--weights", type=Path, required=True, help="a checkpoint of firesteel.train.run")
    args.add_argument("--tokenizer", type=Path, required=True)
    args.add_argument("--out", type=Path, required=True)
    opt = args.parse_args()
    state = torch.load(opt.weights, map_location="cpu", weights_only=True)
    model = V4Train(V4Config.from_dict(state["config"], str(opt.weights)), Numerics())
    model.load_state_dict(state["model"])
    export(model, opt.out, opt.tokenizer)


if __name__ == "__main__":
    main()
