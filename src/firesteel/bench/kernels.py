"""What ``firesteel.bench.invariance`` runs: candidates, a clock, the FP8 linear and the grouped experts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import e8m0_to_float, spread
from firesteel.ops.reference import numeric
from firesteel.ops.triton import folded, fp4, linear, moe, probe
from firesteel.ops.triton.launch import cdiv

NAN = float("nan")


@dataclass(frozen=True)
class Tile:
    """One candidate: tile of outputs by rows, warps, stages, arithmetic, K ranges, one program per range or not."""

    m: int
    n: int
    warps: int
    stages: int
    kind: str
    splits: int = 1
    parallel: bool = True
    cap: int = 0  # registers

    def __str__(self) -> str:
        ranges = f" s{self.splits}{'p' if self.parallel else ''}" if self.splits > 1 else ""
        cap = f" r{self.cap}" if self.cap else ""
        return f"{self.kind} {self.m}x{self.n} w{self.warps} p{self.stages}{ranges}{cap}"


@dataclass(frozen=True)
class Sizes:
    """What is run: FP8 weights [N, K] with their K ranges, and one expert layer."""

    linears: tuple[tuple[str, int, int, int], ...]
    hidden: int
    inner: int
    experts: int
    top: int
    pool: int
    copies: int


FLASH = Sizes(
    (("wq_b", 32768, 1024, 1), ("wo_b", 4096, 8192, 4), ("wq_a", 1024, 4096, 8)), 4096, 2048, 256, 6, 2048, 4
)
TINY = Sizes((("small", 128, 512, 2),), 128, 128, 5, 2, 24, 1)


class Clock:
    """Times a launch by replaying a graph of many; on the CPU nothing is timed."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.end = device, time.monotonic() + seconds

    @property
    def late(self) -> bool:
        """Whether the time set for the whole run is spent."""
        return time.monotonic() > self.end

    def microseconds(self, calls: Sequence[Callable[[], Any]], target: float = 4000.0) -> float | None:
        """Median time of one call; ``calls`` are variants on different memory, taken in turn."""
        if self.device.type == "cpu":
            return None
        for call in calls:
            call()
        once = self._span(lambda: [call() for call in calls], 1) / len(calls)
        count = max(len(calls), min(200, int(target / max(once, 1.0))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        return statistics.median(self._span(graph.replay, count) for _ in range(3))

    @staticmethod
    def _span(run: Callable[[], Any], count: int) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1000.0 / count


def first_line(err: BaseException) -> str:
    """What went wrong, in one line."""
    text = str(err).strip().splitlines()
    return f"{type(err).__name__}: {text[0][:90] if text else ''}"


# ---- ceilings -------------------------------------------------------------------------
def ceilings(clock: Clock, device: torch.device) -> dict[str, float]:
    """Read bandwidth in TB/s, matrix rates in TFLOP/s; assumed ones on the CPU."""
    if device.type == "cpu":
        return {"read_tbs": 1.0, "bf16_tflops": 1.0, "fp8_tflops": 1.0}
    size, n = 2**31, 8192
    data = torch.randint(-9, 9, (size // 4,), dtype=torch.int32, device=device)
    sums = torch.zeros(probe.programs(size // 4), dtype=torch.int32, device=device)
    read = clock.microseconds([lambda: probe.read_all(data, sums)])
    assert read is not None
    out = {"read_tbs": size / read / 1e6}
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    took = clock.microseconds([lambda: torch.mm(a, b)])
    assert took is not None
    out["bf16_tflops"] = 2 * n**3 / took / 1e6
    one = torch.ones((), device=device)
    q, r = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    took = clock.microseconds(
        [lambda: torch._scaled_mm(q, r, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)]
    )
    assert took is not None
    out["fp8_tflops"] = 2 * n**3 / took / 1e6
    return out


def floor_us(read: float, flops: float, rate: float, top: dict[str, float]) -> float:
    """Microseconds below which no form can go."""
    return max(read / top["read_tbs"] / 1e6, flops / rate / 1e6)


# ---- the FP8 linear ----------------------------------------------------------------------
class Fp8:
    """One weight [N, K], several copies of it for timing, and a pool of quantised rows."""

    def __init__(self, n: int, k: int, size: Sizes, device: torch.device):
        self.n, self.k, self.device, blocks = n, k, device, k // 128
        shape = (size.copies, n, k)
        self.w = (torch.randn(shape, device=device) * 80).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes = torch.randint(110, 116, (cdiv(n, 128), blocks), dtype=torch.uint8, device=device)
        self.ws = e8m0_to_float(codes)
        x = (
            torch.randn(size.pool, k, device=device)
            * torch.logspace(-2, 2, size.pool, device=device)[:, None]
        )
        self.q, self.qs = linear.quantise(x.bfloat16(), k, torch.float8_e4m3fn)
        self.arrived = torch.zeros(cdiv(n, 64) * cdiv(size.pool, 16), dtype=torch.int32, device=device)

    def call(self, tile: Tile, q: Tensor, qs: Tensor, out: Tensor, copy: int = 0) -> Callable[[], Any]:
        """A launch ready to run; its scratch is poisoned."""
        rows, spread_over = q.shape[0], tile.splits > 1 and tile.parallel
        part = torch.full((tile.splits if spread_over else 1, rows, self.n), NAN, device=self.device)
        grid: tuple[int, ...] = (cdiv(self.n, tile.m), cdiv(rows, tile.n))
        grid += (tile.splits,) if spread_over else ()
        kernel = linear.linear_kernel[grid]
        w, blocks = self.w[copy], self.k // 128

        def run() -> None:
            kernel(
                w, self.ws, q, qs, out, part, self.arrived, rows, N=self.n, K=self.k, STRIDE=self.k,
                BLOCKS=blocks, LINES=128, GROUP_N=self.n, SPLITS=tile.splits, PARALLEL=spread_over,
                TILE_M=tile.m, TILE_N=tile.n, KIND=tile.kind, SCALED=True,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        return run

    def result(self, tile: Tile, pick: Tensor) -> Tensor:
        """float32 [rows, N] of the pool's rows ``pick``, from a poisoned buffer."""
        out = torch.full((len(pick), self.n), NAN, device=self.device)
        self.call(tile, self.q[pick].contiguous(), self.qs[pick].contiguous(), out)()
        return out

    def exact(self, pick: Tensor) -> Tensor:
        """float64 [rows, N]."""
        x = (self.q[pick].double().unflatten(1, (-1, 128)) * self.qs[pick].double()[..., None]).flatten(1)
        w = self.w[0].double() * spread(self.ws, self.n, self.k).double()
        return x @ w.T

    def timed(self, tile: Tile, rows: int, clock: Clock) -> float | None:
        """Microseconds of one launch with bf16 output; None without a clock."""
        q, qs = self.q[:rows].contiguous(), self.qs[:rows].contiguous()
        out = torch.empty(rows, self.n, dtype=torch.bfloat16, device=self.device)
        return clock.microseconds([self.call(tile, q, qs, out, c) for c in range(len(self.w))])

    def library(self, rows: int, clock: Clock) -> dict[str, Any]:
        """torch._scaled_mm on the same operands: with one scale, and with the block scales if it can."""
        q, qs = self.q[:rows].contiguous(), self.qs[:rows].t().contiguous().t()
        one = torch.ones((), device=self.device)
        out: dict[str, Any] = {}
        grid = self.ws.t()
        forms: dict[str, tuple[Tensor, Tensor]] = {"one scale": (one, one), "blocks": (qs, grid)}
        for name, scales in forms.items():
            try:
                out[name] = clock.microseconds([self.library_call(w, q, *scales) for w in self.w])
            except (RuntimeError, ValueError) as err:
                out["why no " + name] = first_line(err)
        return out

    @staticmethod
    def library_call(w: Tensor, q: Tensor, xs: Tensor, ws: Tensor) -> Callable[[], Any]:
        """One call of the library on these operands."""
        return lambda: torch._scaled_mm(q, w.t(), scale_a=xs, scale_b=ws, out_dtype=torch.bfloat16)

    def floor(self, rows: int, top: dict[str, float]) -> float:
        """Weights, scales and rows read once, results written once; FP8 operations."""
        moved = self.n * self.k + 4 * self.ws.numel() + rows * (self.k * 33 / 32 + 2 * self.n)
        return floor_us(moved, 2.0 * rows * self.n * self.k, top["fp8_tflops"], top)


# ---- experts ------------------------------------------------------------------------------
class Grouped:
    """One layer of routed experts in blocks, and a pool of rows with their routes."""

    def __init__(self, size: Sizes, device: torch.device):
        self.size, self.device = size, device
        d, i, e = size.hidden, size.inner, size.experts

        def blocks(n: int, k: int) -> dict[str, moe.Grouped | folded.Weights]:
            """The same weights as planes and folded, by the kind of product that reads them."""
            m = e * n // 128
            data = torch.randint(0, 256, (m, k // 128, 2, 128, 32), dtype=torch.uint8, device=device)
            scale = torch.randint(119, 122, (m, k // 128, 128, 4), dtype=torch.uint8, device=device)
            words = scale.view(torch.int32).squeeze(-1)
            parts = [fp4.fold_blocks(*part) for part in zip(data.split(256), words.split(256), strict=True)]
            made = [torch.cat([part[j] for part in parts]) for j in range(3)]
            return {
                "bf16": moe.Grouped("planes", data, words, n, k),
                "fp8": folded.Weights(made[0], made[1], made[2], n, k),
            }

        self.w13, self.w2 = blocks(2 * i, d), blocks(d, i)
        x = torch.randn(size.pool, d, device=device) / 4
        self.q, self.qs = linear.quantise(x.bfloat16(), d, torch.float8_e4m3fn)
        grid = (self.q.float().unflatten(1, (-1, 128)) * self.qs[..., None]).flatten(1)
        self.wide = grid.bfloat16()
        self.ids = torch.rand(size.pool, e, device=device).topk(size.top).indices.sort(-1).values
        self.weights = torch.rand(size.pool, size.top, device=device)
        self.asm = device.type == "cuda" and not torch.version.hip
        self.scratch = linear.Scratch(device)

    def stages(self, tile: Tile, pick: Tensor, out: Tensor) -> dict[str, Callable[[], Any]]:
        """The three launches, ready to run in order."""
        e, k = self.size.experts, self.size.top
        ids, weights, qs = (
            self.ids[pick].contiguous(),
            self.weights[pick].contiguous(),
            self.qs[pick].contiguous(),
        )
        x = (self.q if tile.kind == "fp8" else self.wide)[pick].contiguous()
        limit = 10.0
        how = moe.Arithmetic(tile.kind, tile.warps, tile.stages, asm=self.asm, capped=tile.cap)
        parts = (tile.splits, 128 // tile.m)  # of folded weights: no ranges of K
        shape = folded.Shape(*(folded.Part(p, tile.warps, tile.stages) for p in parts))
        scales = qs if tile.kind == "fp8" else None
        lines = moe.plan(ids, e, tile.n, None, scales)
        w13, w2 = self.w13[tile.kind], self.w2[tile.kind]
        made: dict[str, tuple[Tensor, Tensor]] = {}

        def up() -> None:
            made["h"] = moe.up(
                w13,
                how,
                x,
                qs,
                weights,
                lines,
                k,
                limit,
                self.scratch,
                official=True,
                round_h=True,
                parallel=tile.parallel,
                shape=shape,
            )

        def down() -> None:
            moe.down(w2, how, *made["h"], lines, out, self.scratch, tile.parallel, shape)

        return {"plan": lambda: moe.plan(ids, e, tile.n, None, scales), "up": up, "down": down}

    def result(self, tile: Tile, pick: Tensor) -> Tensor:
        """float32 [rows, top, D]: every expert's part of the pool's rows ``pick``."""
        out = torch.full((len(pick) * self.size.top, self.size.hidden), NAN, device=self.device)
        for run in self.stages(tile, pick, out).values():
            run()
        return out.view(len(pick), self.size.top, -1)

    def exact(self, pick: Tensor) -> Tensor:
        """float64 products with the official roundings between them."""
        i, size = self.size.inner, self.size
        m13, m2, planes13, planes2 = 2 * i // 128, size.hidden // 128, self.w13["bf16"], self.w2["bf16"]
        assert isinstance(planes13, moe.Grouped) and isinstance(planes2, moe.Grouped)
        out = torch.zeros(len(pick), size.top, size.hidden, dtype=torch.float64, device=self.device)
        for a, row in enumerate(pick.tolist()):
            for j, e in enumerate(self.ids[row].tolist()):
                part = slice(e * m13, (e + 1) * m13)
                w13 = fp4.unpack_blocks(planes13.data[part], planes13.scale[part]).double()
                gate, up = numeric.bf16((w13 @ self.wide[row].double()).float()).chunk(2)
                h = numeric.silu(gate.clamp_max(10.0)) * up.clamp(-10.0, 10.0) * self.weights[row, j]
                h = numeric.e4m3_groups(numeric.bf16(h)[None], 128)[0]
                part = slice(e * m2, (e + 1) * m2)
                out[a, j] = fp4.unpack_blocks(planes2.data[part], planes2.scale[part]).double() @ h.double()
        return out

    def timed(self, tile: Tile, rows: int, clock: Clock) -> dict[str, float | None]:
        """Microseconds of plan, up, down and of all three in a row."""
        out = torch.empty(rows * self.size.top, self.size.hidden, dtype=torch.bfloat16, device=self.device)
        sets = [
            self.stages(
                tile, torch.arange(rows, device=self.device).add(shift * 7).remainder(self.size.pool), out
            )
            for shift in range(3 if rows < 64 else 1)
        ]
        times = {name: clock.microseconds([s[name] for s in sets]) for name in sets[0]}
        return {**times, "all": clock.microseconds([self.in_a_row(s) for s in sets])}

    @staticmethod
    def in_a_row(stages: dict[str, Callable[[], Any]]) -> Callable[[], Any]:
        """All launches as one call."""
        return lambda: [run() for run in stages.values()]

    def floor(self, rows: int, top: dict[str, float]) -> float:
        """Distinct experts read once, rows in, parts out; operations at the FP8 rate."""
        size = self.size
        hit = int(self.ids[:rows].unique().numel())
        weights = 3 * size.hidden * size.inner * (1 / 2 + 1 / 32)
        moved = hit * weights + rows * (size.hidden + size.top * (2 * size.inner + 2 * size.hidden))
        return floor_us(moved, 6.0 * rows * size.top * size.hidden * size.inner, top["fp8_tflops"], top)
