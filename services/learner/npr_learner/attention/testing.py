"""For tests and benchmarks: random rows, and trees of a given shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from npr_common.dialects import load_dialect
from npr_common.tags import Role, TagIds
from npr_common.topology import topology
from npr_learner.row import Row

TAGS = TagIds.from_ids({tag: index for index, tag in enumerate(load_dialect("npr").tags)})
_WORDS = range(len(TAGS), 32)


def tree(prompt: Sequence[int], blocks: Sequence[Sequence[int]], *, tail: int, generator: np.random.Generator) -> Row:
    """A well-formed trajectory of random words whose response tokens are all trained.

    Args:
        prompt: its ids.
        blocks: for each block the number of words in each step.
        tail: words of every takeaway, and after the last block.
        generator: draws the words.
    """
    ids = list(prompt)
    for steps in blocks:
        plans = [[TAGS.open(Role.PLAN), *_words(2, generator), TAGS.close(Role.PLAN)] for _ in steps]
        ids += [TAGS.open(Role.GUIDELINE), *chain(*plans), TAGS.close(Role.GUIDELINE)]
        for size in steps:
            ids += [TAGS.open(Role.STEP), *_words(size, generator), TAGS.close(Role.STEP)]
        ids += [TAGS.open(Role.TAKEAWAY), *_words(tail, generator), TAGS.close(Role.TAKEAWAY)]
    ids += _words(tail, generator)
    return row_of_ids(ids, len(prompt))


def row_of_ids(ids: Sequence[int], prompt_length: int) -> Row:
    """A row of any ids; all response tokens but seams are trained."""
    shape = topology(ids, prompt_length, TAGS)
    trained = np.flatnonzero(~shape.seams[prompt_length:]) + prompt_length
    return Row(np.asarray(ids, np.int64), shape, trained, np.zeros(len(trained), np.float32))


def random_rows(generator: np.random.Generator, count: int, *, longest_step: int = 30) -> list[Row]:
    """Rows of few prompts: trees of up to three blocks, some cut off anywhere, some without any form."""
    prompts = [_words(int(generator.integers(1, 20)), generator) for _ in range(3)]
    return [_random_row(generator, prompts[generator.integers(3)], longest_step) for _ in range(count)]


def _random_row(generator: np.random.Generator, prompt: Sequence[int], longest_step: int) -> Row:
    blocks = [
        generator.integers(0, longest_step, int(generator.integers(1, 5))).tolist()
        for _ in range(int(generator.integers(0, 4)))
    ]
    row = tree(prompt, blocks, tail=int(generator.integers(1, 12)), generator=generator)
    match generator.integers(4):
        case 0:
            end = int(generator.integers(len(prompt) + 1, len(row) + 1))
            return row_of_ids(row.token_ids[:end].tolist(), len(prompt))
        case 1:
            return row_of_ids(
                [*prompt, *generator.integers(0, 32, int(generator.integers(1, 60))).tolist()], len(prompt)
            )
        case _:
            return row


def _words(count: int, generator: np.random.Generator) -> list[int]:
    found: list[int] = generator.choice(_WORDS, count).tolist()
    return found
