"""The bare step: what a decode step costs when only that is done which memory and arithmetic ask for.

A bare step of M rows is every linear layer of the model once on M rows, with the fastest kernel that is to be had here,
and one read of the keys and values that the step attends to. It leaves out norms, RoPE, softmax, sampling, Python and
the scheduler, so no engine with these kernels can be faster.

- Kernels: the engine's own layers as it has packed them, torch's `linear` in float32 and bfloat16, and oneDNN's packed
  float32 `linear`. Each is timed on all layers one after the other, so that weights come from memory as they do in a
  step (where they don't fit into the cache); the fastest at each M counts.
- Keys and values: their bytes at the measured bandwidth.
- Two bounds say what a bare step of M rows is bound by: `memory`, the weights' bytes at the measured bandwidth (the
  best of a copy, bytes read and written, and of a sum); and `compute`, two operations a weight and row at the measured
  peak (a float32 product of square matrices).
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
from torch import Tensor
from torch.nn import functional

Apply = Callable[[Tensor], Tensor]
_PASSES = 3
_STREAM_BYTES = 256 << 20  # far more than any cache
_SIDE = 2048  # of the square matrices
_GIVE_UP = 2.0  # a kernel this much slower than the best is not tried with more rows


@dataclass(frozen=True)
class Kernel:
    """All linear layers with one implementation.

    Attributes:
        layers: a layer's input size, and the function of [M, in].
        dtype: of the input.
    """

    name: str
    layers: list[tuple[int, Apply]]
    dtype: torch.dtype

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """Median seconds of all layers on so many rows."""
        inputs = {size: torch.full((rows, size), 0.5, dtype=self.dtype) for size, _ in self.layers}
        passes = []
        for _ in range(_PASSES + 1):
            begin = time.perf_counter()
            for size, apply in self.layers:
                apply(inputs[size])
            passes.append(time.perf_counter() - begin)
        return statistics.median(passes[1:])


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

    def __init__(self, model: Any, shapes: Sequence[tuple[int, int]], rows: Sequence[int]) -> None:
        """Args: `model`, the engine's; `shapes`, (out, in) of its linear layers; `rows`, the numbers of rows wanted."""
        self._model = model
        self._shapes = shapes
        self._rows = sorted(set(rows))
        self._linears: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self._bandwidths: list[float] = []
        self._peaks: list[float] = []

    @property
    def weights(self) -> int:
        """Weights in linear layers."""
        return sum(out * size for out, size in self._shapes)

    @property
    def bandwidth(self) -> float:
        """Bytes a second from memory."""
        return statistics.median(self._bandwidths)

    @property
    def peak(self) -> float:
        """float32 operations a second."""
        return statistics.median(self._peaks)

    def sample(self) -> None:
        """Measure everything once."""
        self._bandwidths.append(_bandwidth())
        self._peaks.append(_peak())
        best = dict.fromkeys(self._rows, float("inf"))
        for kernel in _kernels(self._model, self._shapes):
            for rows in self._rows:
                seconds = kernel.seconds(rows)
                self._linears[rows, kernel.name].append(seconds)
                if seconds > _GIVE_UP * best[rows]:
                    break
                best[rows] = min(best[rows], seconds)
            del kernel
            gc.collect()

    def bound(self, rows: int) -> Bound:
        """The bare step of so many rows."""
        measured = {name: statistics.median(v) for (count, name), v in self._linears.items() if count == rows}
        kernel = min(measured, key=lambda name: measured[name])
        width = 2 if "bfloat16" in kernel else self._element_bytes()
        memory = self.weights * width / self.bandwidth
        return Bound(measured[kernel], kernel, memory, 2 * self.weights * rows / self.peak)

    def seconds(self, rows: int, kv_bytes: float) -> float:
        """A bare step of so many rows that reads so many bytes of keys and values."""
        return self.bound(rows).linears + kv_bytes / self.bandwidth

    def _element_bytes(self) -> int:
        itemsize: int = self._model.get_input_embeddings().weight.dtype.itemsize
        return itemsize


def _kernels(model: Any, shapes: Sequence[tuple[int, int]]) -> Iterator[Kernel]:
    """Every implementation there is; those with weights of their own are made when asked for."""
    own = _own_layers(model)
    if sum(module.in_features * module.out_features for module in own) == sum(out * size for out, size in shapes):
        dtype = model.get_input_embeddings().weight.dtype
        yield Kernel("the engine's own", [(module.in_features, module) for module in own], dtype)
    yield _torch_linears(shapes, torch.float32)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        yield _packed_linears(shapes)
    yield _torch_linears(shapes, torch.bfloat16)


def _own_layers(model: Any) -> list[Any]:
    """The modules that are linear layers, whatever class the engine has given them."""
    return [m for m in model.modules() if hasattr(m, "in_features") and hasattr(m, "out_features")]


def _torch_linears(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Kernel:
    def layer(out: int, size: int) -> Apply:
        weight = torch.full((out, size), 0.5, dtype=dtype)
        return lambda x: functional.linear(x, weight)

    return Kernel(
        f"torch {str(dtype).removeprefix('torch.')}", [(size, layer(out, size)) for out, size in shapes], dtype
    )


def _packed_linears(shapes: Sequence[tuple[int, int]]) -> Kernel:
    def layer(out: int, size: int) -> Apply:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.full((out, size), 0.5), 8)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]

    return Kernel("oneDNN packed float32", [(size, layer(out, size)) for out, size in shapes], torch.float32)


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
