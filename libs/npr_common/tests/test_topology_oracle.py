"""Topology against a slow, obviously right oracle.

The oracle never looks at tags: it gets the tree from which the list was written. Two tokens are apart when the tree
puts them in different branches of one block, and a token's position is the longest chain of tokens that it sees.
"""

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npr_common.dialects import load_dialect
from npr_common.tags import Role, TagIds
from npr_common.topology import NONE, SpanKind, Topology, topology

TAGS = TagIds.from_ids({tag: 100 + i for i, tag in enumerate(load_dialect("npr").tags)})
GUIDELINE, END_GUIDELINE = TAGS.open(Role.GUIDELINE), TAGS.close(Role.GUIDELINE)
PLAN, END_PLAN = TAGS.open(Role.PLAN), TAGS.close(Role.PLAN)
STEP, END_STEP = TAGS.open(Role.STEP), TAGS.close(Role.STEP)
TAKEAWAY, END_TAKEAWAY = TAGS.open(Role.TAKEAWAY), TAGS.close(Role.TAKEAWAY)

words = st.lists(st.integers(0, 9), max_size=4)
any_tokens = st.lists(st.one_of(st.integers(0, 9), st.sampled_from(sorted(TAGS))), max_size=40)
inside_step = st.lists(st.one_of(st.integers(0, 9), st.sampled_from(sorted(set(TAGS) - {END_STEP}))), max_size=8)


@dataclass
class Written:
    """A list as the tree writes it: for each token its id, its kind, and its (block, branch) in the tree."""

    ids: list[int] = field(default_factory=list)
    kinds: list[SpanKind] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # of branches and of what follows the last one
    forks: dict[int, int] = field(default_factory=dict)  # a branch's first token -> its `</guideline>`

    def write(self, ids, kind, block=NONE, branch=NONE):
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.places += [(block, branch)] * len(ids)

    def cut(self, length):
        return Written(
            self.ids[:length],
            self.kinds[:length],
            self.places[:length],
            [start for start in self.starts if start < length],
            {start: fork for start, fork in self.forks.items() if start < length},
        )


@st.composite
def trees(draw):
    written = Written()
    written.write(draw(any_tokens), SpanKind.PROMPT)
    prompt_length = len(written.ids)
    for block in range(draw(st.integers(0, 3))):
        written.write(draw(words), SpanKind.PROSE)
        branches = draw(st.integers(1, 6))
        plans = [[*draw(words), PLAN, *draw(words), END_PLAN] for _ in range(branches)]
        written.write([GUIDELINE, *chain.from_iterable(plans), *draw(words), END_GUIDELINE], SpanKind.GUIDELINE, block)
        fork = len(written.ids) - 1
        for branch in range(branches):
            written.starts.append(len(written.ids))
            written.forks[len(written.ids)] = fork
            step = [*draw(words), STEP, *draw(inside_step), END_STEP]
            written.write(step, SpanKind.BRANCH, block, branch)
        written.starts.append(len(written.ids))
        written.write([*draw(words), TAKEAWAY, *draw(words), END_TAKEAWAY], SpanKind.TAKEAWAY, block)
    written.write(draw(words), SpanKind.PROSE)
    return written, prompt_length


def oracle_visible(written, query, key):
    (query_block, query_branch), (key_block, key_branch) = written.places[query], written.places[key]
    siblings = query_block == key_block != NONE and NONE != query_branch != key_branch != NONE
    return key <= query and not siblings


def longest_chains(mask):
    """The position of each token: how many tokens the longest chain of visible ones before it has."""
    positions = np.zeros(len(mask), np.int64)
    for token in range(len(mask)):
        before = np.flatnonzero(mask[token, :token])
        positions[token] = positions[before].max() + 1 if len(before) else 0
    return positions


def predicate_mask(result):
    size = len(result)
    return np.array([[result.visible(q, k) for k in range(size)] for q in range(size)], np.bool_).reshape(size, size)


@settings(max_examples=150, deadline=None)
@given(trees(), st.data())
def test_agrees_with_the_tree_wherever_the_list_is_cut(tree, data):
    written, prompt_length = tree
    cut = data.draw(st.one_of(st.just(len(written.ids)), st.integers(prompt_length, len(written.ids))))
    kinds_are_known = all(cut > i for i in range(len(written.ids)) if written.ids[i] == END_GUIDELINE)
    written = written.cut(cut)
    result = topology(written.ids, prompt_length, TAGS)
    size = len(written.ids)
    expected = np.array([[oracle_visible(written, q, k) for k in range(size)] for q in range(size)], np.bool_)
    np.testing.assert_array_equal(result.dense_mask(), expected.reshape(size, size))
    np.testing.assert_array_equal(result.positions, longest_chains(result.dense_mask()))
    np.testing.assert_array_equal(result.branch_of, [branch for _, branch in written.places])
    np.testing.assert_array_equal(np.flatnonzero(result.seams), written.starts)
    np.testing.assert_array_equal(result.predecessors, [written.forks.get(i, i - 1) for i in range(size)])
    if kinds_are_known:
        np.testing.assert_array_equal(result.block_of, [block for block, _ in written.places])
        assert [span.kind for span in result.spans for _ in range(len(span))] == written.kinds


@settings(max_examples=60, deadline=None)
@given(trees())
def test_both_forms_of_the_mask_agree(tree):
    written, prompt_length = tree
    result = topology(written.ids, prompt_length, TAGS)
    np.testing.assert_array_equal(predicate_mask(result), result.dense_mask())


@settings(max_examples=200, deadline=None)
@given(any_tokens, st.integers(0, 45))
def test_any_list_has_a_topology(ids, prompt_length):
    result = topology(ids, prompt_length, TAGS)
    assert [i for span in result.spans for i in range(span.start, span.end)] == list(range(len(ids)))
    np.testing.assert_array_equal(result.positions, longest_chains(result.dense_mask()))
    np.testing.assert_array_equal(predicate_mask(result), result.dense_mask())
    assert not np.any(result.block_of[: result.prompt_length] != NONE)
    visible_before = [result.visible(i, int(p)) for i, p in enumerate(result.predecessors) if p != NONE]
    assert all(visible_before)


@settings(max_examples=100, deadline=None)
@given(any_tokens, any_tokens)
def test_what_comes_later_changes_nothing_before(ids, later):
    whole, part = topology(ids + later, 3, TAGS), topology(ids, min(3, len(ids)), TAGS)
    size = len(ids)
    np.testing.assert_array_equal(whole.positions[:size], part.positions)
    np.testing.assert_array_equal(whole.dense_mask()[:size, :size], part.dense_mask())
    np.testing.assert_array_equal(whole.predecessors[:size], part.predecessors)


def test_a_written_out_example():
    ids = [1, GUIDELINE, PLAN, END_PLAN, PLAN, END_PLAN, END_GUIDELINE]
    ids += [5, STEP, 7, END_STEP, STEP, END_STEP, 5, TAKEAWAY, END_TAKEAWAY, 9]
    result = topology(ids, 1, TAGS)
    assert result.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7, 8, 11, 12, 13, 14]
    assert [(span.kind.value, span.start, span.end) for span in result.spans] == [
        ("prompt", 0, 1),
        ("guideline", 1, 7),
        ("branch", 7, 11),
        ("branch", 11, 13),
        ("takeaway", 13, 16),
        ("prose", 16, 17),
    ]
    assert (result.depth, result.critical_path_length, result.block_count) == (15, 14, 1)
    assert not result.visible(11, 10)
    assert result.visible(13, 10)
    assert result.visible(11, 6)


def test_tags_of_the_prompt_open_nothing():
    block = [GUIDELINE, PLAN, END_PLAN, END_GUIDELINE, STEP, END_STEP]
    assert topology(block, len(block), TAGS).block_count == 0
    assert topology([GUIDELINE, PLAN, END_PLAN, END_GUIDELINE], 1, TAGS).block_count == 0
    assert topology([*block, *block], len(block), TAGS).block_count == 1


def test_a_guideline_without_plans_opens_nothing():
    ids = [PLAN, END_PLAN, GUIDELINE, END_GUIDELINE, STEP, END_STEP, STEP, END_STEP]
    assert topology(ids, 0, TAGS).positions.tolist() == list(range(len(ids)))


def test_causal_is_a_triangle():
    result = Topology.causal(5, prompt_length=2)
    np.testing.assert_array_equal(result.dense_mask(), np.tri(5, dtype=np.bool_))
    assert result.critical_path_length == 3
    assert len(Topology.causal(0)) == 0


def test_arrays_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Topology.causal(3).positions[0] = 7
    with pytest.raises(ValueError, match="negative"):
        topology([1], -1, TAGS)
