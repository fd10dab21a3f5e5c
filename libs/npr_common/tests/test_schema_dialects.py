"""Dialects are tables: bundled ones by name, others by path, broken ones refused with a reason."""

import pytest
from pydantic import ValidationError

from npr_common.dialects import InvalidDialectError, UnknownDialectError, bundled_dialects, load_dialect
from npr_common.schema import parse_text
from npr_common.tags import Role, Tag, TagIds

TABLE = "name: mine\ntags: {guideline: map, plan: task, step: work, takeaway: reduce}\nlabel: '#{index}.'\n"


def test_the_tags_of_npr_in_their_order():
    assert " ".join(load_dialect("npr").tag_texts) == (
        "<guideline> </guideline> <plan> </plan> <step> </step> <takeaway> </takeaway>"
    )


def test_the_tags_of_multiverse_wrap_the_block():
    dialect = load_dialect("multiverse")
    assert dialect.wrapped
    assert (len(dialect.tags), dialect.open(Role.BLOCK), dialect.close(Role.STEP)) == (10, "<Parallel>", "</Path>")


def test_every_bundled_dialect_loads_under_its_name():
    assert [load_dialect(name).name for name in bundled_dialects()] == ["multiverse", "npr"]


def test_a_dialect_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE)
    dialect = load_dialect(path)
    assert dialect.label_of(3) == "#3."
    text = "<map><task>#1. a</task></map><work>#1. b</work><reduce>c</reduce>"
    assert parse_text(text, dialect).well_formed
    assert not parse_text(text.replace("#1. a", "1: a"), dialect).well_formed


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("step: work, ", "", "no tag name for step"),
        ("step: work", "step: task", "same tag name"),
        ("step: work", "step: 'wo rk'", "pattern"),
        ("{index}", "", "label holds"),
        ("name: mine", "name: mine\ncolour: red", "colour"),
        ("name: mine", "name: [", "correct its table"),
    ],
)
def test_a_broken_table_is_refused(tmp_path, old, new, reason):
    path = tmp_path / "broken.yaml"
    path.write_text(TABLE.replace(old, new))
    with pytest.raises(InvalidDialectError, match=reason):
        load_dialect(path)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UnknownDialectError, match="multiverse, npr"):
        load_dialect("nrp")


def test_a_dialect_does_not_change():
    with pytest.raises(ValidationError):
        load_dialect("npr").name = "other"


def test_tag_ids_go_both_ways_and_are_distinct():
    dialect = load_dialect("npr")
    ids = TagIds.from_ids({tag: 50 + i for i, tag in enumerate(dialect.tags)})
    assert all(ids.get(ids.id_of[tag]) == tag for tag in dialect.tags)
    assert (ids.open(Role.STEP), ids.close(Role.STEP), ids.get(1)) == (54, 55, None)
    assert 57 in ids
    assert 58 not in ids
    with pytest.raises(ValueError, match="token of its own"):
        TagIds.from_ids({Tag(Role.STEP): 1, Tag(Role.PLAN): 1})
