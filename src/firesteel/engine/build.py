"""From a checkpoint folder to a running engine; every choice it makes is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from firesteel.checkpoint.reader import Checkpoint
from firesteel.config import EngineConfig, ParameterError, SpeculativeConfig
from firesteel.engine.loop import Engine
from firesteel.engine.memory import Memory
from firesteel.engine.prefix import PrefixCache
from firesteel.engine.profile import Profiler, fingerprint
from firesteel.engine.rehearsal import record_graphs
from firesteel.engine.runner import Runner
from firesteel.engine.slots import Slots
from firesteel.engine.sync import SyncGuard
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.dspark import Drafter, build_drafter
from firesteel.models.deepseek_v4.layout import confidence_name, open_checkpoint
from firesteel.models.deepseek_v4.model import Target
from firesteel.models.deepseek_v4.weights import build_target
from firesteel.ops import BackendError, Choice, Numerics, build
from firesteel.speculation import simulated
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive, Policy
from firesteel.speculation.survival import Calibrator, Coefficients
from firesteel.tokenizer import Tokenizer

FILE_TRUST = 10.0  # how much more a calibration file weighs than the prior
SMALL = 1024  # hidden size up to which one op is too short to be worth a second thread
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


def place(settings: EngineConfig) -> tuple[Choice, torch.device]:
    """The ops and the device they compute on; on a GPU only the Triton ops run.

    Raises ParameterError if device and backend contradict each other or there is no such device,
    BackendError if the backend cannot run.
    """
    numerics, backend = Numerics(settings.numerics == "official"), settings.backend
    cpu, reasons = torch.device("cpu"), {}
    if backend == "triton":
        ops = build("triton", numerics)
        device = getattr(ops, "device", cpu)
        if settings.device == "cpu" and device.type != "cpu":
            raise ParameterError("backend='triton': computes on the GPU; set device='auto' or backend='auto'")
        return Choice(ops, {}), device
    if settings.device == "cuda" and backend != "auto":
        raise ParameterError(
            f"backend={backend!r}: computes on the CPU only; set device='cpu' or backend='triton'"
        )
    nothing = "torch sees no CUDA or ROCm device"
    if not torch.cuda.is_available():
        if settings.device == "cuda":
            raise ParameterError(f"device='cuda': {nothing}; set device='cpu'")
        reasons["triton"] = nothing
    elif settings.device == "cuda" or (settings.device == "auto" and backend == "auto"):
        try:
            return Choice(build("triton", numerics), {}), torch.device("cuda", torch.cuda.current_device())
        except BackendError as err:
            if settings.device == "cuda":
                raise
            reasons["triton"] = str(err)
    for name in ("native", "reference") if backend == "auto" else (backend,):
        try:
            return Choice(build(name, numerics), reasons if backend == "auto" else {}), cpu
        except BackendError as err:
            if backend != "auto":
                raise
            reasons[name] = str(err)
    raise AssertionError("the reference backend always runs")


def build_engine(
    path: str | Path | None, settings: EngineConfig, progress: Callable[[str], None] = lambda _: None
) -> Built:
    """Load a checkpoint (the bundled one if ``path`` is None) and make its engine."""
    folder = BUNDLED if path is None else Path(path)
    config = V4Config.load(folder)
    threads = settings.threads or (1 if config.hidden_size <= SMALL else torch.get_num_threads())
    torch.set_num_threads(threads)
    choice, device = place(settings)
    notes = [
        f"device: {device}",
        f"ops: {choice.ops.name}",
        f"numerics: {settings.numerics}",
        f"threads: {threads}",
    ]
    notes += [f"ops {name} not used: {why}" for name, why in choice.reasons.items()]
    length = model_length(config, settings)
    with open_checkpoint(folder, config, drafter=settings.speculative is not None) as checkpoint:
        if settings.speculative is not None:
            check_drafter(checkpoint, config, settings.speculative, length)
        target = Target(config, build_target(checkpoint, config, choice.ops, device, progress), choice.ops)
        drafter = None
        if settings.speculative is not None:
            progress("drafter")
            drafter = make_drafter(checkpoint, config, target, settings.speculative, notes)
        checkpoint.finish()
    return assemble(config, settings, target, drafter, folder, notes, progress)


def assemble(
    config: V4Config,
    settings: EngineConfig,
    target: Target,
    drafter: Drafter | None,
    folder: Path,
    notes: list[str],
    progress: Callable[[str], None] = lambda _: None,
) -> Built:
    """The engine around loaded weights; ``folder`` may hold a tokenizer and a calibration file."""
    device, length = target.weights.embed.device, model_length(config, settings)
    runner = make_runner(config, settings, target, drafter, length)
    memory = runner.memory
    if device.type == "cpu":
        notes.append("graphs not used: there is no launch to save on a CPU")
    elif not settings.graphs:
        notes.append("graphs not used: graphs=False")
    else:
        notes.append(record_graphs(runner, settings, length, progress).note)
    policy = make_policy(runner, settings, length, folder, notes, progress)
    cache = None
    if settings.prefix_caching:
        cache = PrefixCache(memory.pool, memory.page_size, f"{settings.numerics} {target.ops.name}")
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder)
        tokenizer.check(config.vocab_size, config.bos_token_id, config.eos_token_id)
    else:
        notes.append("no tokenizer.json: prompts must be token ids")
    eos = tuple(dict.fromkeys((config.eos_token_id, *(tokenizer.stop_token_ids if tokenizer else ()))))
    engine = Engine(settings, config.vocab_size, length, eos, memory, runner, cache, policy)
    return Built(engine, config, tokenizer, folder, tuple(notes))


def make_runner(
    config: V4Config, settings: EngineConfig, target: Target, drafter: Drafter | None, length: int
) -> Runner:
    """A runner over loaded weights with pages and slots of its own; requests of at most ``length`` tokens."""
    device = target.weights.embed.device
    slots, gamma = settings.slots, settings.gamma
    stages = len(drafter.weights.stages) if drafter is not None else 0
    pages = page_count(config, settings, length)
    return Runner(
        target,
        Memory(config, slots, length, pages, gamma, device, stages, target.ops.cache),
        Slots(slots + 1, config.vocab_size, length, gamma, device),
        SyncGuard(settings.debug_sync, device),
        drafter,
        settings.speculative,
        settings.debug_poison,
    )


def check_drafter(checkpoint: Checkpoint, config: V4Config, settings: SpeculativeConfig, length: int) -> None:
    """Raise ParameterError if this checkpoint cannot draft as asked; before any weight is read."""
    k, layout = settings.num_speculative_tokens, checkpoint.layout
    assert layout is not None, "open_checkpoint checks a layout"
    if config.dspark is None or not layout.drafter:
        raise ParameterError(
            f"speculative method 'dspark': {checkpoint.folder} has no DSpark drafter (no dspark_* fields in "
            "config.json or no main_proj among its mtp.* tensors); leave the speculative config out or use a "
            "checkpoint that ships one"
        )
    if k >= length:
        raise ParameterError(f"num_speculative_tokens={k}: not below max_model_len={length}; lower it")
    if settings.confidence == "head" and not layout.confidence_head:
        raise ParameterError(
            f"confidence='head': {checkpoint.folder} has no tensor '{confidence_name(config)}'; "
            "set confidence='auto' to estimate survival without it"
        )


def make_drafter(
    checkpoint: Checkpoint,
    config: V4Config,
    target: Target,
    settings: SpeculativeConfig,
    notes: list[str],
) -> Drafter:
    """The drafter of a checkpoint that ``check_drafter`` let pass."""
    k, layout = settings.num_speculative_tokens, checkpoint.layout
    assert layout is not None and config.dspark is not None, "checked before"
    if k > config.dspark.block_size:
        notes.append(
            f"warning: num_speculative_tokens={k} is above the trained block of {config.dspark.block_size}; "
            "drafts behind it are rarely accepted"
        )
    head = confidence_name(config)
    if not layout.confidence_head:
        notes.append(f"no confidence head in the checkpoint ('{head}'): survival is estimated without it")
    notes.append(f"speculation: dspark, K={k}, {settings.acceptance} acceptance")
    if settings.simulated_acceptance is not None:
        notes.append(f"SIMULATED acceptance: the text is meaningless; {settings.simulated_acceptance}")
    use_head = layout.confidence_head and settings.confidence != "none"
    if layout.confidence_head and not use_head:
        checkpoint.skip(head, "confidence='none'")
        notes.append("confidence head not used: confidence='none'")
    weights = build_drafter(checkpoint, config, target.ops, target.weights.embed.device, use_head)
    return Drafter(config, weights, target)


def make_policy(
    runner: Runner,
    settings: EngineConfig,
    length: int,
    folder: Path,
    notes: list[str],
    progress: Callable[[str], None],
) -> Policy | None:
    """The adaptive policy with its prices and calibration, or None for fixed widths."""
    spec = settings.speculative
    if spec is None or not spec.enable_adaptive_verification or runner.drafter is None:
        return None
    gamma = spec.num_speculative_tokens
    if spec.cost_table is not None:
        table = CostTable.load(spec.cost_table, fingerprint(runner, gamma))
        notes.append(f"adaptive: prices from {spec.cost_table}")
    else:
        table = Profiler(runner, gamma, settings.max_num_batched_tokens, length).run(progress)
        notes.append(f"adaptive: measured {len(table.rows)} row counts at start")
    uses_head = runner.drafter.weights.markov.confidence is not None
    coefficients = Coefficients.prior(gamma, uses_head, not spec.rejection)
    own = folder / "calibration.json"
    if spec.simulated_acceptance is not None:
        coefficients = simulated.coefficients(spec.simulated_acceptance, gamma, uses_head, not spec.rejection)
        notes.append("adaptive: calibration of the simulated acceptance")
        return Adaptive(gamma, CostModel(table), Calibrator(coefficients, trust=FILE_TRUST))
    file = spec.calibration or (str(own) if own.is_file() else None)
    if file is not None:
        coefficients = Coefficients.load(file).fitted_to(gamma, uses_head, not spec.rejection)
        notes.append(f"adaptive: calibration from {Path(file).name}")
    else:
        notes.append("adaptive: no calibration file; starting from a prior, refitted from traffic")
    calibrator = Calibrator(coefficients, trust=1.0 if file is None else FILE_TRUST)
    return Adaptive(gamma, CostModel(table), calibrator, rejection=spec.rejection)
