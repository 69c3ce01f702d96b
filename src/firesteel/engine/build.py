"""From a checkpoint folder to a running engine; every choice it makes is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from firesteel.checkpoint.reader import Checkpoint
from firesteel.config import EngineConfig, ParameterError
from firesteel.engine.loop import Engine
from firesteel.engine.memory import Memory
from firesteel.engine.prefix import PrefixCache
from firesteel.engine.runner import Runner
from firesteel.engine.slots import Slots
from firesteel.engine.sync import SyncGuard
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.layout import open_checkpoint
from firesteel.models.deepseek_v4.model import Target
from firesteel.models.deepseek_v4.weights import build_target
from firesteel.ops import Numerics, select
from firesteel.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent.parent / "checkpoint" / "demo"


@dataclass(frozen=True)
class Built:
    """An engine with what made it."""

    engine: Engine
    model: V4Config
    tokenizer: Tokenizer | None
    path: Path
    notes: tuple[str, ...]


def model_length(config: V4Config, settings: EngineConfig) -> int:
    """Tokens one request may have in all; a longer wish than the checkpoint's is an error."""
    top = config.max_position_embeddings
    wish = settings.max_model_len
    if wish is None:
        return min(top, settings.default_model_len)
    if wish > top:
        raise ParameterError(f"max_model_len={wish}: the checkpoint allows {top}; lower max_model_len")
    return wish


def page_count(config: V4Config, settings: EngineConfig, length: int) -> int:
    """History pages: the setting, or every slot at full length and a quarter more for the prefix cache."""
    if settings.num_pages is not None:
        return settings.num_pages
    return -(-length // config.page_size) * settings.slots * 5 // 4 + 8


def build_engine(
    path: str | Path | None, settings: EngineConfig, progress: Callable[[str], None] = lambda _: None
) -> Built:
    """Load a checkpoint (the bundled one if ``path`` is None) and make its engine."""
    folder = BUNDLED if path is None else Path(path)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = torch.device("cpu")
    config = V4Config.load(folder)
    choice = select(settings.backend, Numerics(settings.numerics == "official"))
    notes = [f"ops: {choice.ops.name}", f"numerics: {settings.numerics}"]
    notes += [f"ops {name} not used: {why}" for name, why in choice.reasons.items()]
    length = model_length(config, settings)
    with open_checkpoint(folder, config) as checkpoint:
        skip_drafter(checkpoint)
        weights = build_target(checkpoint, config, choice.ops, device, progress)
        checkpoint.finish()
    slots, gamma = settings.slots, 0
    memory = Memory(config, slots, length, page_count(config, settings, length), gamma, device)
    runner = Runner(
        Target(config, weights, choice.ops),
        memory,
        Slots(slots + 1, config.vocab_size, length, gamma, device),
        SyncGuard(settings.debug_sync, device),
        settings.debug_poison,
    )
    cache = None
    if settings.prefix_caching:
        cache = PrefixCache(memory.pool, memory.page_size, f"{settings.numerics} {choice.ops.name}")
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
        tokenizer.check(config.vocab_size, config.bos_token_id, config.eos_token_id)
    else:
        notes.append("no tokenizer.json: prompts must be token ids")
    eos = tuple(dict.fromkeys((config.eos_token_id, *(tokenizer.stop_token_ids if tokenizer else ()))))
    engine = Engine(settings, config.vocab_size, length, eos, memory, runner, cache)
    return Built(engine, config, tokenizer, folder, tuple(notes))


def skip_drafter(checkpoint: Checkpoint) -> None:
    """Declare the drafter's tensors unused while no drafter runs."""
    assert checkpoint.layout is not None, "open_checkpoint checks a layout"
    for name in checkpoint.layout.specs:
        if name.startswith("mtp."):
            checkpoint.skip(name, "speculation is off")
