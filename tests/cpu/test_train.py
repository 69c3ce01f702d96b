"""The trainable V4 against transformers, and its own invariants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from firesteel.models.deepseek_v4.config import V4Config, Yarn
from firesteel.train import quant
from firesteel.train.attention import Numerics
from firesteel.train.model import V4Train

pytestmark = pytest.mark.cpu


def tiny(**changes: object) -> V4Config:
    """A geometry with every layer kind, small enough for a CPU."""
    cfg = V4Config(
        vocab_size=96, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=64,
        qk_rope_head_dim=16, q_lora_rank=64, o_lora_rank=32, o_groups=2, index_n_heads=16, index_head_dim=32,
        index_topk=4, sliding_window=16, compress_ratios=(0, 4, 16, 4), rope_theta=10000.0,
        compress_rope_theta=160000.0, yarn=Yarn(4.0, 64, 32.0, 1.0), max_position_embeddings=256,
        rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, moe_intermediate_size=64,
        n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, num_hash_layers=1,
        routed_scaling_factor=1.5, swiglu_limit=10.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return dataclasses.replace(cfg, **changes)  # type: ignore[arg-type]


def randomise(model: V4Train, seed: int = 3) -> None:
    """Random values everywhere, also where training starts from constants."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=gen)
        p.data += noise * (0.3 if p.ndim == 1 or "ape" in name or name.endswith("_fn") else 0.02)
    for name, b in model.named_buffers():
        if name.endswith("gate.bias"):
            b += 0.1 * torch.randn(b.shape, generator=gen)


HF_NAMES = {
    "attn.q_norm": "self_attn.q_a_norm", "attn.wq_a": "self_attn.q_a_proj", "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj", "attn.kv_norm": "self_attn.kv_norm", "attn.attn_sink": "self_attn.sinks",
    "attn.wo_a": "self_attn.o_a_proj", "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias", "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.w2": "mlp.experts.down_proj", "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj", "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    **{f"hc_{part}_{what}": f"{part}_hc.{what}" for part in ("attn", "ffn") for what in ("fn", "base", "scale")},
}  # fmt: skip
HF_TOP = {
    "embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight", "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale",
}  # fmt: skip


def hf_state(model: V4Train) -> dict[str, Tensor]:
    """Our weights under transformers' names."""
    ours = model.state_dict()
    out = {HF_TOP[k]: v for k, v in ours.items() if k in HF_TOP}
    for key, value in ours.items():
        if not key.startswith("layers."):
            continue
        _, number, rest = key.split(".", 2)
        if rest in ("ffn.experts.w1", "ffn.experts.w3"):
            continue
        name = HF_NAMES.get(rest) or HF_NAMES[rest.removesuffix(".weight")] + ".weight"
        out[f"model.layers.{number}.{name}"] = value
    for i in range(len(model.layers)):
        pair = [ours[f"layers.{i}.ffn.experts.{w}"] for w in ("w1", "w3")]
        out[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat(pair, 1)
    return out


def hf_model(cfg: V4Config) -> torch.nn.Module:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}
    assert cfg.yarn is not None
    factor = cfg.qk_rope_head_dim / cfg.head_dim
    hf = DeepseekV4Config(
        **{k: getattr(cfg, k) for k in (
            "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
            "head_dim", "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "routed_scaling_factor",
            "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit",
            "sliding_window", "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "index_topk",
            "rms_norm_eps", "rope_theta", "compress_rope_theta",
        )},
        layer_types=[kinds[r] for r in cfg.compress_ratios],
        compress_rates={kinds[4]: 4, kinds[16]: 16},
        mlp_layer_types=["hash_moe" if cfg.is_hash_layer(i) else "moe" for i in range(cfg.num_hidden_layers)],
        partial_rotary_factor=factor,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": cfg.rope_theta, "partial_rotary_factor": factor},
            "compress": {
                "rope_type": "yarn", "rope_theta": cfg.compress_rope_theta, "partial_rotary_factor": factor,
                "factor": cfg.yarn.factor, "beta_fast": cfg.yarn.beta_fast, "beta_slow": cfg.yarn.beta_slow,
                "original_max_position_embeddings": cfg.yarn.original_max_position_embeddings,
                "attention_factor": 1.0,
            },
        },
    )  # fmt: skip
    return DeepseekV4ForCausalLM(hf)


def build(num: Numerics, cfg: V4Config | None = None) -> V4Train:
    torch.manual_seed(1)
    model = V4Train(cfg or tiny(), num)
    randomise(model)
    return model.eval()


FLOAT32 = Numerics(quantise=False, dtype=torch.float32)


@torch.no_grad()
def test_float32_forward_equals_transformers() -> None:
    cfg = tiny()
    model = build(FLOAT32, cfg)
    other = hf_model(cfg).eval()
    missing, unexpected = other.load_state_dict(hf_state(model), strict=False)
    assert not unexpected and not [m for m in missing if "rotary" not in m], (missing, unexpected)
    tokens = torch.randint(3, cfg.vocab_size, (2, 75), generator=torch.Generator().manual_seed(5))
    ours = model.logits(model(tokens).hidden)
    theirs = other(tokens, use_cache=False).logits
    assert ours.std() > 0.3
    assert (ours - theirs).abs().max() < 2e-4


@torch.no_grad()
def test_indexer_choice_matters() -> None:
    """The comparison above exercises the top-k: choosing all entries gives another result."""
    cfg = tiny()
    tokens = torch.randint(3, cfg.vocab_size, (1, 75), generator=torch.Generator().manual_seed(5))
    few = build(FLOAT32, cfg)
    many = build(FLOAT32, dataclasses.replace(cfg, index_topk=64))
    few, many = few(tokens).hidden, many(tokens).hidden
    assert torch.equal(few[:, :19], many[:, :19])
    assert (few - many).abs().max() > 1e-2


@pytest.mark.parametrize("quantise", [False, True])
@torch.no_grad()
def test_packed_documents_equal_documents_alone(quantise: bool) -> None:
    cfg = dataclasses.replace(tiny(), index_topk=64)
    model = build(Numerics(quantise, torch.float32), cfg)
    gen = torch.Generator().manual_seed(6)
    docs = [torch.randint(3, 96, (n,), generator=gen) for n in (37, 16, 50)]
    row = torch.full((1, 128), 2)
    blocks = torch.full((1, 8), -1, dtype=torch.int32)
    places = []
    at = 0
    for i, doc in enumerate(docs):
        row[0, at : at + len(doc)] = doc
        span = -(-len(doc) // 16)
        blocks[0, at // 16 : at // 16 + span] = i
        places.append(at)
        at += span * 16
    packed = model(row, blocks, 1).hidden[0]
    for doc, start in zip(docs, places, strict=True):
        alone = model(doc[None]).hidden[0]
        difference = (packed[start : start + len(doc)] - alone).abs()
        # a rounding step may flip where rotated values differ in the last bit
        assert difference.mean() < (2e-2 if quantise else 1e-5), difference.mean()
    other = row.clone()
    other[0, :37] = 5
    assert torch.allclose(model(other, blocks, 1).hidden[0, 48:112], packed[48:112], atol=1e-6)


def test_fake_formats_are_the_stored_formats() -> None:
    from firesteel.checkpoint.codecs import QTensor

    gen = torch.Generator().manual_seed(7)
    w = torch.randn(200, 320, generator=gen) * torch.exp(2 * torch.randn(200, 1, generator=gen))
    w[:32] = (w[:32] * 4).round() / 4  # ties
    assert torch.equal(quant.fake_fp4_weight(w), QTensor.fp4(w).dequant())
    assert torch.equal(quant.fake_fp8_weight(w), QTensor.fp8(w).dequant())
    for fake in (quant.fake_fp4_weight, quant.fake_fp8_weight, quant.fake_act):
        x = w[:, :256]
        assert torch.equal(fake(fake(x)), fake(x))


def test_straight_through_gradient_is_identity() -> None:
    x = torch.randn(4, 256).requires_grad_()
    weight = torch.randn(4, 256)
    (quant.fake_act(x) * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight)


def test_pow2_ceil_is_exact() -> None:
    x = torch.tensor([1.0, 2.0, 0.75, 1.0000001, 3.0, 2.0**-20, 448.0 / 448])
    assert quant.pow2_ceil(x).tolist() == [1.0, 2.0, 1.0, 2.0, 4.0, 2.0**-20, 1.0]


def test_learning_and_reload(tmp_path: Path) -> None:
    """A few steps on one batch lower the loss; the exported folder computes the same logits."""
    from firesteel.train.export import export, load
    from firesteel.train.optim import Optimiser

    torch.manual_seed(2)
    num = Numerics(True, torch.float32)
    model = V4Train(tiny(), num).train()
    optimiser = Optimiser(model)
    tokens = torch.randint(3, 96, (2, 64), generator=torch.Generator().manual_seed(8))
    losses = []
    for _ in range(12):
        out = model(tokens)
        logits = model.logits(out.hidden[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + out.index_loss).backward()
        optimiser.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1.0, losses
    for p in model.parameters():
        p.data = p.data.bfloat16().float()  # parts stored in BF16 are compared at that precision
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = export(model, tmp_path / "out", tmp_path / "tokenizer.json")
    again = load(folder, num).eval()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model.logits(model(tokens).hidden), again.logits(again(tokens).hidden))


@torch.no_grad()
def test_greedy_does_not_depend_on_the_guess() -> None:
    from firesteel.train.evaluate import greedy

    model = build(Numerics(False, torch.float32))
    prompts = [[0, 5, 9, 33], [0, 7, 8, 9, 10, 11, 50]]
    plain = greedy(model, prompts, [[], []], limit=12)
    good = greedy(model, prompts, [plain[0], [*plain[1][:5], 4, 4]], limit=12)
    assert plain == good
    steps = [list(prompts[0])]
    for _ in range(12):
        best = model.logits(model(torch.tensor(steps)).hidden)[0, -1].argmax()
        steps[0].append(int(best))
    assert steps[0][4:] == plain[0]


def test_numbers_and_steps_are_plain() -> None:
    from firesteel.train import gsm

    cases = ("36.0", "1,200", "4.50", "-3.0", "7", "half")
    assert [gsm.plain_number(c) for c in cases] == ["36", "1200", "4.5", "-3", "7", "half"]
    text = gsm.plain_text("He has 3.0 + 4.05 = 7.05.\n\n  \u2022 14.0 left\n#### 14.0")
    assert text == "He has 3 + 4.05 = 7.05.\n- 14 left"


def test_evaluation_problems_are_the_published_ones_and_never_trained() -> None:
    gym = pytest.importorskip("reasoning_gym")
    from firesteel.train import gsm

    problems = gsm.evaluation_set(2026, 60)
    published = gym.create_dataset("gsm_symbolic", seed=2026, size=80)
    questions = [published[i]["question"] for i in range(80)]
    held = [q for q, t in zip(questions, Random(2026).choices(gsm.TEMPLATES, k=80)) if t in gsm.held_out()]
    assert len(held) >= 2, "some of them are of held-out templates"
    assert [p.question for p in problems] == [q for q in questions if q not in held][:60]
    assert not {p.template for p in problems} & set(gsm.held_out())
    assert gsm.held_out() == (2, 40, 41, 80, 96)
    kept = tuple(t for t in gsm.TEMPLATES if t not in gsm.held_out())
    first = gsm.stream(0, frozenset(), kept)()
    skipping = gsm.stream(0, frozenset([first.question]), kept)
    drawn = [skipping() for _ in range(60)]
    assert first.question not in {p.question for p in drawn}
    assert not {p.template for p in drawn} & set(gsm.held_out())


def test_rows_hold_whole_aligned_documents() -> None:
    import numpy as np
    from tokenizers import Tokenizer

    pytest.importorskip("reasoning_gym")
    import firesteel.checkpoint
    from firesteel.train import data, gsm

    folder = Path(firesteel.checkpoint.__file__).parent / "demo"
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shape = data.Shape(rows=4, long_rows=1, length=2048)
    stream = np.random.default_rng(0).integers(30, 3000, 20000).astype(np.uint16)
    texts = {n: data.Texts(stream, data.line_ends(tok)) for n in ("code", "prose")}
    mixer = data.Mixer(tok, texts, shape, 3, frozenset())
    batch = mixer.batch()
    for i in range(shape.rows):
        ids, classes = batch["tokens"][i], batch["classes"][i]
        blocks = batch["blocks"][i].tolist()
        used = [b for b in blocks if b >= 0]
        assert used == sorted(used)
        for number in set(used):
            start = blocks.index(number) * shape.align
            assert ids[start] == 0 and classes[start] == gsm.SCAFFOLD
            assert used.count(number) * shape.align <= (shape.length if i == 0 else shape.short)
        assert (classes[ids == 2] == gsm.SCAFFOLD).all()
    for turns in (1, 3):
        segments = gsm.chat([mixer.problem() for _ in range(turns)], turns == 1, mixer.rng)
        whole = tok.encode("".join(t for t, _ in segments), add_special_tokens=False).ids
        assert data.encode(tok, segments).ids.tolist() == whole
