"""Paged attention that reads a shared prefix once.

- `plan`: which tokens attend to which runs of which tables, level by level; the same for every device.
- `interface`: the hook behind `transformers`' attention interface, and the choice of a backend.
- `cascade_cpu`: the CPU's kernel (numba), which reads the pages in place.
- `flash_infer`: the GPU's kernels (FlashInfer), where installed.
- `sdpa`: gathers and calls SDPA, on any device; the oracle of the other two in tests.
"""
