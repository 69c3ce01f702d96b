"""Reader and writer against each other, against safetensors and transformers, and against damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firesteel.checkpoint import Checkpoint, CheckpointError, QTensor, reader
from firesteel.checkpoint.writer import write_file
from firesteel.models.deepseek_v4.config import ConfigError, V4Config
from firesteel.models.deepseek_v4.config_parse import dump_converted
from firesteel.models.deepseek_v4.layout import expected_tensors, open_checkpoint, rank_slices, write_official
from firesteel.models.deepseek_v4.random_init import random_tensors, tiny_config, write_random

TINY = tiny_config()
INDEX = "model.safetensors.index.json"
LAYER0 = "model-00002-of-00009.safetensors"  # 4 layers + 3 stages + 2


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound random checkpoint; tests copy it before they break it."""
    return write_random(tmp_path_factory.mktemp("official") / "ck", TINY, seed=7)


@pytest.fixture
def broken(official: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(official, tmp_path / "ck"))


def edit(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite one shard with the independent library; the index stays as it is."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def read_all(checkpoint: Checkpoint) -> Iterator[tuple[str, QTensor]]:
    """Every weight of the layout once, as a loader would read it."""
    assert checkpoint.layout is not None
    for name in checkpoint.layout.specs:
        if not name.endswith(".scale"):
            yield name, checkpoint.qtensor(name.removesuffix(".weight"))
    checkpoint.finish()


# ---- round trips ---------------------------------------------------------------------------------
@pytest.mark.parametrize("experts", ["fp4", "fp8"])
@pytest.mark.parametrize("scales", ["e8m0", "f32"])
@pytest.mark.parametrize("quantised", [True, False])
def test_what_is_written_is_read(tmp_path: Path, experts: str, scales: str, quantised: bool) -> None:
    kinds = {"expert_format": experts, "linear_scales": scales, "quantised": quantised}
    write_random(tmp_path / "ck", TINY, 3, **kinds)  # type: ignore[arg-type]
    want = dict(random_tensors(TINY, 3, **kinds))  # type: ignore[arg-type]
    with open_checkpoint(tmp_path / "ck") as checkpoint:
        got = dict(read_all(checkpoint))
    assert set(got) == set(want)
    for name, value in want.items():
        other = got[name]
        if isinstance(value, torch.Tensor):
            assert other.scale is None and torch.equal(other.data, value), name
        else:
            assert other.format == value.format and other.shape == value.shape
            assert torch.equal(other.dequant(), value.dequant()), name


def test_official_files_read_by_the_independent_library(official: Path) -> None:
    index = json.loads((official / INDEX).read_text())
    specs = expected_tensors(TINY)
    assert set(index["weight_map"]) == set(specs)
    total = 0
    for file in sorted(set(index["weight_map"].values())):
        for name, tensor in load_file(official / file).items():
            assert tuple(tensor.shape) == specs[name].shape and index["weight_map"][name] == file
            total += tensor.numel() * tensor.element_size()
    assert total == index["metadata"]["total_size"] == sum(s.nbytes for s in specs.values())
    assert index["weight_map"]["layers.0.attn.wkv.weight"] == LAYER0
    assert not list(official.glob("*.tmp"))
    assert V4Config.load(official) == TINY


def test_tensors_are_aligned_to_their_own_size(official: Path) -> None:
    for file in official.glob("*.safetensors"):
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        assert (8 + length) % 8 == 0
        for name, entry in header.items():
            if name != "__metadata__":
                size = reader.DTYPE_BYTES[entry["dtype"]]
                assert entry["data_offsets"][0] % size == 0, name


def test_seed_decides_everything(tmp_path: Path, official: Path) -> None:
    again = write_random(tmp_path / "a", TINY, seed=7)
    other = write_random(tmp_path / "b", TINY, seed=8)
    assert (again / LAYER0).read_bytes() == (official / LAYER0).read_bytes()
    assert (other / LAYER0).read_bytes() != (official / LAYER0).read_bytes()


def test_size_limited_shards(tmp_path: Path) -> None:
    folder = write_official(
        tmp_path / "ck",
        TINY,
        random_tensors(TINY, 1),
        one_file_per_layer=False,
        shard_bytes=300_000,
    )
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert all(f.stat().st_size < 340_000 for f in files)


def test_single_file_and_extra_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = write_random(
        tmp_path / "ck", TINY, 1, one_file_per_layer=False, extra_files=[tmp_path / "tokenizer.json"]
    )
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    with Checkpoint.open(folder / "model.safetensors") as checkpoint:
        checkpoint.check(expected_tensors(TINY))


def test_tensors_outlive_the_files(official: Path) -> None:
    with open_checkpoint(official) as checkpoint:
        weight = checkpoint.qtensor("layers.0.attn.wq_a")
    assert torch.isfinite(weight.dequant()).all()


def test_rank_slices_join_to_the_whole(official: Path) -> None:
    with open_checkpoint(official) as checkpoint:
        assert checkpoint.layout is not None
        for name in ("layers.0.attn.wq_b", "layers.0.attn.wo_b", "layers.0.ffn.experts.5.w1"):
            spec = checkpoint.layout.specs[f"{name}.weight"]
            whole = checkpoint.qtensor(name).data
            parts = [rank_slices(spec, rank, 2, 8) for rank in range(2)]
            if spec.tp == "expert":
                assert parts[0] is None and parts[1] is not None
                continue
            read = [checkpoint.tensor(f"{name}.weight", part).view(torch.uint8) for part in parts]
            assert torch.equal(torch.cat(read, int(spec.tp[-1])), whole.view(torch.uint8))


def test_absent_confidence_head_and_drafter(tmp_path: Path) -> None:
    with open_checkpoint(write_random(tmp_path / "a", TINY, 1, confidence_head=False)) as checkpoint:
        assert checkpoint.layout is not None
        assert not checkpoint.layout.confidence_head and checkpoint.layout.drafter
        list(read_all(checkpoint))
    folder = write_random(tmp_path / "b", TINY, 1, drafter=False)
    assert V4Config.load(folder).dspark is None
    list(read_all(open_checkpoint(folder)))


def test_random_values_are_sane(official: Path) -> None:
    with open_checkpoint(official) as checkpoint:
        got = dict(read_all(checkpoint))
    table = got["layers.0.ffn.gate.tid2eid"].data
    assert table.unique().tolist() == list(range(8))
    assert (table[:, 0] != table[:, 1]).all()
    assert got["layers.1.ffn.gate.bias"].data.abs().min() > 0
    for name, value in got.items():
        if value.format != "i64" and not name.endswith("_scale"):
            dense = value.dequant()
            assert dense.std() > 0 or dense.numel() == 1, name
            assert dense.abs().max() < 10, name


# ---- foreign checkpoints -------------------------------------------------------------------------
def test_transformers_checkpoints_are_read(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hf.DeepseekV4ForCausalLM(hf.DeepseekV4Config(**dump_converted(TINY)))
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(table.shape[0], 8).argsort(-1)[:, :2])
    model.save_pretrained(tmp_path / "saved")
    modules = {k: v.contiguous() for k, v in model.state_dict().items()}
    (tmp_path / "modules").mkdir()
    save_file(modules, tmp_path / "modules" / "model.safetensors")
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path / "modules")

    config = replace(TINY, dspark=None, mtp_stages=0)
    assert V4Config.load(tmp_path / "saved") == config
    with open_checkpoint(tmp_path / "saved") as a, open_checkpoint(tmp_path / "modules") as b:
        saved, stacked = dict(read_all(a)), dict(read_all(b))
    assert (
        set(saved)
        == set(stacked)
        == set(expected_tensors(config, expert_format="dense", linear_format="dense"))
    )
    for name, value in saved.items():
        assert torch.equal(value.data, stacked[name].data), name
    layer = model.model.layers[1]
    up = layer.mlp.experts.gate_up_proj[3]
    assert torch.equal(saved["layers.1.ffn.experts.3.w3.weight"].data, up[64:])
    assert torch.equal(saved["layers.1.attn.kv_norm.weight"].data, layer.self_attn.kv_norm.weight)


def test_our_checkpoints_are_read_by_transformers(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    write_random(tmp_path / "ck", TINY, 2, quantised=False, dense_dtype=torch.float32)
    (tmp_path / "ck" / "config.json").write_text(json.dumps(dump_converted(TINY)))
    model, info = hf.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "ck", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    ids = torch.randint(3, 512, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.isfinite(logits).all() and 1 < logits.std() < 10
    assert logits.argmax(-1).unique().numel() > 20  # the random model does not repeat itself


# ---- damage: found before any data is read --------------------------------------------------------
def refuse(folder: Path, *parts: str, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Opening fails, the message has all parts, and no tensor data was touched."""
    if monkeypatch is not None:
        monkeypatch.setattr(reader, "safe_open", None)
    with pytest.raises(CheckpointError) as err:
        open_checkpoint(folder)
    for part in parts:
        assert part in str(err.value), (part, str(err.value))


def test_truncated_shard(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = broken / LAYER0
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 10)
    refuse(
        broken,
        LAYER0,
        "truncated",
        "tensor '",
        f"expected {size} bytes, found {size - 10}",
        monkeypatch=monkeypatch,
    )
    with file.open("r+b") as handle:
        handle.truncate(200)
    refuse(broken, LAYER0, "truncated")
    file.write_bytes(b"abc")
    refuse(broken, LAYER0, "truncated", "found 3 bytes")


def test_surplus_bytes(broken: Path) -> None:
    with (broken / LAYER0).open("ab") as handle:
        handle.write(b"\0" * 5)
    refuse(broken, LAYER0, "data no tensor names")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ((1 << 62).to_bytes(8, "little"), "not a safetensors file"),
        (b"<html><body>not found</body></html>", "not a safetensors file"),
        ((4).to_bytes(8, "little") + b"{no}", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "expected a JSON object"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not valid JSON"),
        (b"", "truncated"),
    ],
)
def test_header_garbage(broken: Path, head: bytes, message: str) -> None:
    (broken / LAYER0).write_bytes(head)
    refuse(broken, LAYER0, message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "F99"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "expected 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "expected data at offset 0"),
        ({"dtype": "F32", "shape": [1]}, "data_offsets"),
        ([], "expected an object"),
    ],
)
def test_header_entries(tmp_path: Path, entry: object, message: str) -> None:
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"tensor 'x'") as err:
        Checkpoint.open(tmp_path)
    assert message in str(err.value)


def test_duplicate_key_in_one_header(tmp_path: Path) -> None:
    entry = '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = f"{{{entry},{entry}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CheckpointError, match="'x': duplicate"):
        Checkpoint.open(tmp_path)


def test_missing_scale(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "layers.0.attn.wq_a.scale"
    edit(broken, LAYER0, lambda t: t.pop(name) and None)
    refuse(broken, name, "missing", "[1, 1]", "not in the file", monkeypatch=monkeypatch)


def test_wrong_dtype(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "layers.0.ffn.experts.3.w1.scale"
    edit(broken, LAYER0, lambda t: t.update({name: t[name].view(torch.int8)}))
    refuse(broken, LAYER0, name, "F8_E8M0", "found I8", monkeypatch=monkeypatch)


def test_wrong_shape(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "layers.0.attn.wkv.weight"
    edit(
        broken,
        LAYER0,
        lambda t: t.update({name: t[name].view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)}),
    )
    refuse(broken, name, "expected shape [64, 128], found [128, 64]", monkeypatch=monkeypatch)


def test_surplus_tensor(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(broken, LAYER0, lambda t: t.update({"layers.0.attn.rotary.inv_freq": torch.ones(8)}))
    refuse(broken, "layers.0.attn.rotary.inv_freq", "surplus", "no entry", monkeypatch=monkeypatch)


def test_duplicate_tensor_in_two_shards(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "model-00003-of-00009.safetensors"
    name = "layers.0.attn.attn_sink"
    edit(broken, other, lambda t: t.update({name: torch.zeros(4)}))
    refuse(broken, name, "duplicate", LAYER0, other, monkeypatch=monkeypatch)


def test_index_to_a_missing_file(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken / LAYER0).unlink()
    refuse(broken, LAYER0, INDEX, "no such file", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "body", ["", "[]", "{}", '{"weight_map": {"x": 3}}', '{"weight_map": {"x": "../y"}}']
)
def test_index_garbage(broken: Path, body: str) -> None:
    (broken / INDEX).write_text(body)
    refuse(broken, INDEX)


def test_twenty_problems_are_listed_and_the_rest_counted(broken: Path) -> None:
    edit(broken, LAYER0, lambda t: [t.pop(n) for n in list(t) if ".experts." in n] and None)
    with pytest.raises(CheckpointError) as err:
        open_checkpoint(broken)
    text = str(err.value)
    assert text.count("\n  - ") == 20 and "more" in text.splitlines()[-1]


def test_unknown_architecture_and_null_fields(broken: Path) -> None:
    raw = json.loads((broken / "config.json").read_text())
    for change, word in (({"model_type": "deepseek_v3"}, "model_type"), ({"head_dim": None}, "head_dim")):
        (broken / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ConfigError, match=rf"config\.json.*{word}"):
            open_checkpoint(broken)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)


# ---- damage: found in the values -----------------------------------------------------------------
def poison(tensor: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    out = tensor.clone()
    if out.element_size() == 1:
        out.view(torch.uint8)[index] = int(value)
    else:
        out[index] = value
    return out


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("layers.0.attn_norm.weight", (5,), float("nan"), "index [5]: expected a finite value, found nan"),
        ("layers.0.hc_attn_fn", (3, 17), float("-inf"), "index [3, 17]: expected a finite value, found -inf"),
        ("layers.0.attn.wq_a.weight", (1, 2), 0x7F, "index [1, 2]: expected an E4M3 value"),
        ("layers.0.attn.wq_a.weight", (1, 2), 0xFF, "found code 255"),
        ("layers.0.attn.wq_a.scale", (0, 0), 255, "index [0, 0]: expected an E8M0 scale"),
        ("layers.0.ffn.experts.2.w2.scale", (9, 1), 255, "index [9, 1]: expected an E8M0 scale"),
        ("layers.0.ffn.gate.tid2eid", (44, 1), 8, "index [44, 1]: expected an expert id in 0..7, found 8"),
        ("layers.0.ffn.gate.tid2eid", (44, 0), -1, "found -1"),
    ],
)
def test_bad_values_name_the_first_index(
    broken: Path, name: str, index: tuple[int, ...], value: float, message: str
) -> None:
    edit(broken, LAYER0, lambda t: t.update({name: poison(t[name], index, value)}))
    with open_checkpoint(broken) as checkpoint, pytest.raises(CheckpointError) as err:
        list(read_all(checkpoint))
    assert f"{LAYER0}: tensor '{name}'" in str(err.value) and message in str(err.value)
    unchecked = open_checkpoint(broken, check_values=False)
    unchecked.tensor(name)


def test_repeated_experts_of_a_token(broken: Path) -> None:
    name = "layers.0.ffn.gate.tid2eid"

    def change(t: dict[str, torch.Tensor]) -> None:
        t[name][7] = torch.tensor([3, 3])

    edit(broken, LAYER0, change)
    with open_checkpoint(broken) as checkpoint, pytest.raises(CheckpointError, match=r"row 7.*\[3, 3\]"):
        checkpoint.tensor(name)


def test_legal_extremes_pass(broken: Path) -> None:
    edit(
        broken,
        LAYER0,
        lambda t: t.update(
            {
                "layers.0.attn.wq_a.weight": poison(t["layers.0.attn.wq_a.weight"], (0, 0), 0x7E),
                "layers.0.attn.wq_a.scale": poison(t["layers.0.attn.wq_a.scale"], (0, 0), 254),
            }
        ),
    )
    with open_checkpoint(broken) as checkpoint:
        checkpoint.qtensor("layers.0.attn.wq_a")


# ---- every tensor exactly once -------------------------------------------------------------------
def test_forgotten_and_repeated_reads(official: Path) -> None:
    checkpoint = open_checkpoint(official)
    names = list(read_all(checkpoint))
    checkpoint.tensor("norm.weight")
    with pytest.raises(CheckpointError, match=r"'norm.weight'.*read 2 times"):
        checkpoint.finish()
    assert len(names) > 300
    fresh = open_checkpoint(official)
    with pytest.raises(CheckpointError, match="was never read"):
        fresh.finish()


def test_skipping_is_declared(official: Path) -> None:
    checkpoint = open_checkpoint(official)
    assert checkpoint.layout is not None
    for name in checkpoint.layout.specs:
        checkpoint.skip(name, "test")
    checkpoint.finish()
    checkpoint.tensor("norm.weight")
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        checkpoint.finish()
    with pytest.raises(CheckpointError, match="not in this checkpoint"):
        checkpoint.skip("norm.bias", "test")


def test_ignored_tensors_must_stay_unread(official: Path) -> None:
    checkpoint = open_checkpoint(official, drafter=False)
    assert checkpoint.layout is not None and len(checkpoint.layout.ignored) == 241
    list(read_all(checkpoint))
    checkpoint.tensor("mtp.0.main_norm.weight")
    with pytest.raises(CheckpointError, match="is ignored"):
        checkpoint.finish()


def test_a_lone_quantised_weight_is_not_joined(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [("x.weight", torch.zeros(4, 16, dtype=torch.int8))])
    with pytest.raises(CheckpointError, match=r"'x\.scale': missing"):
        Checkpoint.open(tmp_path).qtensor("x")
