"""Functions that numba compiles, once for one thread and once for several.

Invariant: both give the same bits, for each thread's share is computed by the same loop (tests assert it where a choice
between them depends on the load).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

# One OpenMP pool for torch and for numba, which finds torch's: two pools would fight for the cores.
os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MATH = {"reassoc", "contract", "nsz", "arcp"}  # but not nnan and ninf: a running maximum starts at -inf
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2; the first is exact
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_TAYLOR = tuple(
    map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
)


class Kernel:
    """A function of arrays that uses `numba.prange`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._serial = _compile(function, parallel=False)
        self._parallel = _compile(function, parallel=True)
        self._loaded: set[bool] = set()  # which of them, by whether it is the parallel one

    def __call__(self, *arguments: Any, threads: int) -> None:
        """Run it with so many threads at most."""
        parallel = threads > 1
        if parallel not in self._loaded:
            self._load(arguments, threads)
        elif parallel:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            self._parallel(*arguments)
        else:
            self._serial(*arguments)

    def _load(self, arguments: tuple[Any, ...], threads: int) -> None:
        """The first run. Compiling starts numba's threads, which sets OpenMP's number of them: torch's too."""
        before = torch.get_num_threads()
        self._loaded.add(threads > 1)
        self(*arguments, threads=threads)
        torch.set_num_threads(before)


def inlined(function: Callable[..., Any]) -> Any:
    """A function that becomes part of the kernels that call it: a call would count references to arrays, atomically."""
    return numba.njit(function, fastmath=_MATH, error_model="numpy", inline="always")


def _compile(function: Callable[..., None], *, parallel: bool) -> Any:
    options = {"fastmath": _MATH, "nogil": True, "parallel": parallel, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder to cache in, such as in a container that may not write: compiled in each process
        return numba.njit(function, **options)


@inlined
def exp(x: Any) -> Any:
    """e**x in float32, within 1e-7 of it relatively, for -87 <= x <= 88 (other numbers are taken as these).

    Made of operations that the compiler vectorises, which the library's is not: 2**n * e**r with |r| <= ln(2) / 2 and
    the polynomial of Cephes (Moshier, 1992).
    """
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _TAYLOR[0]
    p = p * r + _TAYLOR[1]
    p = p * r + _TAYLOR[2]
    p = p * r + _TAYLOR[3]
    p = p * r + _TAYLOR[4]
    p = p * r + _TAYLOR[5]
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1.0)) * power


def array(tensor: torch.Tensor) -> Array:
    """The tensor's memory for a kernel; bfloat16 as the bits that numpy can hold."""
    tensor = tensor.contiguous()
    view: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return view
