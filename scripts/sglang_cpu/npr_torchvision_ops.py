"""Lets the torchvision wheel from the package index be imported beside a CPU build of torch.

That wheel's compiled half is built for CUDA and does not load, and its Python half then registers fake kernels for two
operators that nobody has defined. Here they are defined, just before torchvision is imported. They are never called.
"""

import contextlib
import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define("nms")
            _define("qnms")


def _define(name):
    import torch  # noqa: PLC0415 - most processes of this environment never import it

    with contextlib.suppress(RuntimeError):  # it is there after all
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
