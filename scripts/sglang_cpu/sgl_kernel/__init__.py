"""Stands in for SGLang's CUDA kernels where there is no GPU: importable, and nothing in it can be called.

SGLang imports names from here at start; on a CPU with `torch_native` attention it calls none of them.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    missing.__name__ = name
    return missing
