"""The bare step: what a decode step costs when only that is done which memory and arithmetic ask for.

A bare step of M rows is every linear layer of the model once on M rows, with the fastest kernel that is to be had here,
and one read of the keys and values that the step attends to. It leaves out norms, RoPE, softmax, sampling, Python and
the scheduler, so no engine with these kernels can be faster.

- Kernels: the engine's own layers as it has packed them (padding included), and as rivals torch's `linear` in float32
  and bfloat16, oneDNN's packed float32 and FBGEMM's packed float16. Layers are timed one after the other, so that
  weights come from memory as they do in a step, where they don't fit into the cache. Rivals have weights of their own,
  on a part of the layers that is far larger than the cache, scaled up by the number of weights. The fastest at each M
  counts.
- Keys and values: their bytes at the measured bandwidth.
- Two bounds say what a bare step of M rows is bound by: `memory`, the weights' bytes at the measured bandwidth (the
  best of a copy, bytes read and written, of a sum, and of what a kernel gets through); and `compute`, two operations a
  weight and row at the measured peak (the best of a float32 product of square matrices and of what a kernel does).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _subjects import Linears
from torch import Tensor
from torch.nn import functional

OWN = "the engine's own"
Apply = Callable[[Tensor], Tensor]
_PASSES = 3
_STREAM_BYTES = 256 << 20  # far more than any cache
_SIDE = 2048  # of the square matrices
_PART = 64 << 20  # weights that a rival kernel is timed on
_GIVE_UP = 2.0  # a kernel this much slower than the best is not tried with more rows


@dataclass(frozen=True)
class Kernel:
    """All linear layers with one implementation.

    Attributes:
        layers: a layer's input size, and the function of [M, in].
        dtype: of the input.
        weight_bytes: of one weight.
        part: which part of the model's weights these layers have.
    """

    name: str
    layers: list[tuple[int, Apply]]
    dtype: torch.dtype
    weight_bytes: int
    part: float = 1.0

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """Median seconds of all the model's layers on so many rows."""
        inputs = {size: torch.full((rows, size), 0.5, dtype=self.dtype) for size, _ in self.layers}
        passes = []
        for _ in range(_PASSES + 1):
            begin = time.perf_counter()
            for size, apply in self.layers:
                apply(inputs[size])
            passes.append(time.perf_counter() - begin)
        return statistics.median(passes[1:]) / self.part


@dataclass(frozen=True)
class Bound:
    """A bare step of some rows, in seconds.

    Attributes:
        linears: measured, with `kernel`.
        memory: the weights' bytes at the measured bandwidth; likewise `compute`, operations at the measured peak.
    """

    linears: float
    kernel: str
    memory: float
    compute: float

    @property
    def at(self) -> str:
        """What it is bound by."""
        return "memory" if self.memory >= self.compute else "compute"


class Roofline:
    """Measures bare steps of one model. `sample` is called once a round, and medians over rounds count."""

    def __init__(self, model: Any, linears: Linears, rows: Sequence[int]) -> None:
        """Args: `model`, the engine's; `linears`, its layers; `rows`, the numbers of rows that are asked for."""
        self._model = model
        self._linears = linears
        self._rows = sorted(set(rows))
        self._seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self._weight_bytes: dict[str, int] = {}
        self._bandwidths: list[float] = []
        self._peaks: list[float] = []

    @property
    def bandwidth(self) -> float:
        """Bytes a second from memory."""
        read = [self._linears.weights * self._weight_bytes[name] / s for (_, name), s in self._medians()]
        return max(statistics.median(self._bandwidths), *read)

    @property
    def peak(self) -> float:
        """Operations a second."""
        done = [2 * self._linears.weights * rows / s for (rows, _), s in self._medians()]
        return max(statistics.median(self._peaks), *done)

    def sample(self) -> None:
        """Measure everything once."""
        self._bandwidths.append(_bandwidth())
        self._peaks.append(_peak())
        best = dict.fromkeys(self._rows, float("inf"))
        for kernel in _kernels(self._model, self._linears):
            self._weight_bytes[kernel.name] = kernel.weight_bytes
            for rows in self._rows:
                seconds = kernel.seconds(rows)
                self._seconds[rows, kernel.name].append(seconds)
                if seconds > _GIVE_UP * best[rows]:
                    break
                best[rows] = min(best[rows], seconds)
            del kernel
            gc.collect()

    def bound(self, rows: int) -> Bound:
        """The bare step of so many rows."""
        measured = {name: seconds for (count, name), seconds in self._medians() if count == rows}
        kernel = min(measured, key=lambda name: measured[name])
        memory = self._linears.weights * self._weight_bytes[kernel] / self.bandwidth
        return Bound(measured[kernel], kernel, memory, 2 * self._linears.weights * rows / self.peak)

    def seconds(self, rows: int, kv_bytes: float) -> float:
        """A bare step of so many rows that reads so many bytes of keys and values."""
        return self.bound(rows).linears + kv_bytes / self.bandwidth

    def _medians(self) -> list[tuple[tuple[int, str], float]]:
        """(rows, kernel), and seconds."""
        return [(key, statistics.median(samples)) for key, samples in self._seconds.items()]


def _kernels(model: Any, linears: Linears) -> Iterator[Kernel]:
    """Every implementation there is; those with weights of their own are made when asked for."""
    own = [m for m in model.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")]
    if sum(module.in_features * module.out_features for module in own) == linears.weights:
        yield Kernel(
            OWN,
            [(module.in_features, module) for module in own],
            getattr(own[0], "weight", torch.empty(0)).dtype,  # packed layers, which have none, take float32
            model.get_input_embeddings().weight.dtype.itemsize,
        )
    part = linears.part(_PART)
    for name, (prepare, dtype, weight_bytes) in _implementations().items():
        layers = [(size, prepare(torch.full((out, size), 0.5))) for out, size in part.shapes]
        yield Kernel(name, layers, dtype, weight_bytes, part.weights / linears.weights)


def _implementations() -> dict[str, tuple[Callable[[Tensor], Apply], torch.dtype, int]]:
    """By name: from a float32 weight to the function, the type of its input, and the bytes of a weight."""
    made: dict[str, tuple[Callable[[Tensor], Apply], torch.dtype, int]] = {
        "torch float32": (lambda w: lambda x: functional.linear(x, w), torch.float32, 4),
    }
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        made["oneDNN packed float32"] = (_onednn, torch.float32, 4)
    if "fbgemm" in torch.backends.quantized.supported_engines:
        made["FBGEMM packed float16"] = (_fbgemm, torch.float32, 2)
    made["torch bfloat16"] = (_bfloat16, torch.bfloat16, 2)
    return made


def _bfloat16(weight: Tensor) -> Apply:
    weight = weight.bfloat16()
    return lambda x: functional.linear(x, weight)


def _onednn(weight: Tensor) -> Apply:
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight, 8), torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, None, "none", [], "")


def _fbgemm(weight: Tensor) -> Apply:
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16
    return lambda x: multiply(x, packed)


def _bandwidth() -> float:
    source = torch.ones(_STREAM_BYTES // 4)
    target = torch.empty_like(source)
    copy = 2 * _STREAM_BYTES / _fastest(lambda: target.copy_(source))
    read = _STREAM_BYTES / _fastest(source.sum)
    return max(copy, read)


def _peak() -> float:
    square = torch.full((_SIDE, _SIDE), 0.5)
    return 2 * _SIDE**3 / _fastest(lambda: square @ square)


def _fastest(work: Callable[[], object]) -> float:
    passes = []
    for _ in range(_PASSES + 1):
        begin = time.perf_counter()
        work()
        passes.append(time.perf_counter() - begin)
    return min(passes)
