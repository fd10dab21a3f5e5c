"""Paged attention that reads a shared prefix once.

    plan.py         which rows' tokens attend to which runs of which tables, level by level (device-independent)
    interface.py    the hook behind `transformers`' attention interface, and the choice of a backend
    cascade_cpu.py  the CPU's kernel (numba): reads the pages in place
    flash_infer.py  the GPU's kernels (FlashInfer), where installed
    sdpa.py         gathers and calls SDPA: any device, and the oracle of the other two in tests
"""
