"""Each rule of the grammar: well-formed responses give their tree, each broken rule its code."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npr_common.dialects import load_dialect
from npr_common.schema import ParserUsageError, State, StreamingParser, ViolationCode, has_final_box, parse_text
from npr_common.tags import Role

NPR, MULTIVERSE = load_dialect("npr"), load_dialect("multiverse")
C = ViolationCode
BLOCK = (
    "<guideline>\n<plan>1: add</plan>\n<plan>2: multiply</plan>\n</guideline>\n"
    "<step>1: 2+2=4</step>\n<step>2: 3*3=9</step>\n<takeaway>13</takeaway>"
)

words = st.text(alphabet="ab <>=é\n", min_size=1, max_size=8).filter(str.strip)
blanks = st.sampled_from(["", " ", "\n", "\t\n "])


def element(dialect, role, content):
    return f"{dialect.open(role)}{content}{dialect.close(role)}"


@st.composite
def responses(draw, dialect):
    """A well-formed response, and for each block its plans, steps and takeaway."""
    text, blocks = "", []
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(1, 4))
        plans, steps = draw(st.tuples(*[st.lists(words, min_size=n, max_size=n)] * 2))
        takeaway = draw(words)
        inside = draw(blanks) + "".join(
            element(dialect, Role.PLAN, f"{i}: {plan}") + draw(blanks) for i, plan in enumerate(plans, 1)
        )
        block = element(dialect, Role.GUIDELINE, inside) + draw(blanks)
        for i, step in enumerate(steps, 1):
            block += element(dialect, Role.STEP, f"{i}: {step}") + draw(blanks)
        block += element(dialect, Role.TAKEAWAY, takeaway)
        text += draw(words) + (element(dialect, Role.BLOCK, f"\n{block}\n") if dialect.wrapped else block)
        blocks.append(([p.strip() for p in plans], [s.strip() for s in steps], takeaway.strip()))
    return text + draw(st.one_of(st.just(""), words)), blocks


@pytest.mark.parametrize("dialect", [NPR, MULTIVERSE], ids=["npr", "multiverse"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_well_formed_response_gives_its_tree(dialect, data):
    text, blocks = data.draw(responses(dialect))
    result = parse_text(text, dialect)
    assert result.well_formed, result.violations
    assert result.holds_block == bool(blocks)
    tree = result.tree
    assert [([p.text for p in b.plans], [s.text for s in b.steps], b.takeaway.text) for b in tree.blocks] == blocks
    assert all([p.label for p in b.plans] == list(range(1, len(b.plans) + 1)) for b in tree.blocks)
    assert "".join(text[part.span.start : part.span.end] for part in tree.parts) == text


def test_spans_hold_their_own_tags():
    block = parse_text(f"so: {BLOCK} done", NPR).tree.blocks[0]
    source = f"so: {BLOCK} done"
    shown = [source[x.span.start : x.span.end] for x in (block, block.plans[1], block.steps[0], block.takeaway)]
    assert shown == [BLOCK, "<plan>2: multiply</plan>", "<step>1: 2+2=4</step>", "<takeaway>13</takeaway>"]


def only(old, new):
    assert BLOCK.count(old) == 1, old
    return BLOCK.replace(old, new)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (BLOCK, []),
        ("just 3 < 4", []),
        ("</step>", [C.UNEXPECTED_TAG]),
        ("<plan>1: a</plan>", [C.UNEXPECTED_TAG, C.UNEXPECTED_TAG]),
        (only("<takeaway>13</takeaway>", ""), [C.MISSING_TAKEAWAY]),
        (only("</takeaway>", ""), [C.UNCLOSED_TAG]),
        (only("</takeaway>", "</step>"), [C.UNEXPECTED_TAG, C.UNCLOSED_TAG]),
        (only("2+2=4</step>", "2+2=4"), [C.UNCLOSED_TAG]),
        (only("<step>2: 3*3=9</step>", ""), [C.PLAN_STEP_COUNT_MISMATCH]),
        (only("<takeaway>", "<step>3: x</step><takeaway>"), [C.PLAN_STEP_COUNT_MISMATCH]),
        (only("<plan>1: add", "<plan>2: add"), [C.LABEL_OUT_OF_ORDER]),
        (only("<step>2:", "<step>02:"), [C.LABEL_OUT_OF_ORDER]),
        (only("<plan>1: add", "<plan>add"), [C.MISSING_LABEL]),
        (only("<plan>1: add", f"<plan>{'9' * 5000}: add"), [C.MISSING_LABEL]),
        (only("<plan>1: add", "<plan>1: "), [C.EMPTY_PLAN]),
        (only("2+2=4", "\n"), [C.EMPTY_STEP]),
        (only("13", ""), [C.EMPTY_TAKEAWAY]),
        (only("</guideline>\n", "</guideline> and\nso "), [C.STRAY_TEXT_BETWEEN_TAGS]),
        (only("<guideline>\n", "<guideline>\nPlans:"), [C.STRAY_TEXT_BETWEEN_TAGS]),
        (
            only("2+2=4", "<step>1: 4"),
            [C.UNCLOSED_TAG, C.EMPTY_STEP, C.LABEL_OUT_OF_ORDER, C.LABEL_OUT_OF_ORDER, C.PLAN_STEP_COUNT_MISMATCH],
        ),
        (only("2+2=4", "<plan>x</plan>"), [C.NESTED_TAG, C.UNEXPECTED_TAG]),
        (only("2+2=4", "<guideline></guideline>"), [C.NESTED_TAG, C.UNEXPECTED_TAG]),
        (only("13", "<takeaway>13"), [C.NESTED_TAG]),
        (only("<guideline>\n", "<guideline>\n<guideline>"), [C.NESTED_TAG]),
        (
            only("multiply</plan>\n</guideline>", "multiply"),
            [C.NESTED_TAG, C.UNEXPECTED_TAG] * 2
            + [C.NESTED_TAG, C.UNEXPECTED_TAG, C.UNCLOSED_TAG, C.UNCLOSED_TAG]
            + [C.PLAN_STEP_COUNT_MISMATCH, C.MISSING_TAKEAWAY],
        ),
        (only("multiply</plan>\n", "multiply\n"), [C.UNCLOSED_TAG]),
        (only("</plan>\n</guideline>", "</plan>\n"), [C.UNCLOSED_TAG]),
        ("<guideline></guideline>", [C.NO_PLAN, C.MISSING_TAKEAWAY]),
        ("<guideline><plan>1: a", [C.UNCLOSED_TAG, C.UNCLOSED_TAG, C.PLAN_STEP_COUNT_MISMATCH, C.MISSING_TAKEAWAY]),
        (only("<takeaway>13</takeaway>", "") + BLOCK, [C.MISSING_TAKEAWAY]),
        (only("</takeaway>", "") + BLOCK, [C.UNCLOSED_TAG]),
    ],
)
def test_each_broken_rule_has_its_code(text, codes):
    found = [violation.code for violation in parse_text(text, NPR).violations]
    assert found == codes


WRAPPED = (
    "<Parallel><Goal>Two things.<Outline>1: a</Outline></Goal><Path>1: b</Path><Conclusion>c</Conclusion></Parallel>"
)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (WRAPPED, []),
        (WRAPPED.replace("</Parallel>", ""), [C.UNCLOSED_TAG]),
        (WRAPPED.replace("<Parallel>", ""), [C.UNEXPECTED_TAG, C.UNEXPECTED_TAG]),
        (WRAPPED.replace("</Parallel>", "x</Parallel>"), [C.STRAY_TEXT_BETWEEN_TAGS]),
        (WRAPPED.replace("</Outline>", "</Outline>x"), [C.STRAY_TEXT_BETWEEN_TAGS]),
        (WRAPPED.replace("<Conclusion>c</Conclusion>", ""), [C.MISSING_TAKEAWAY]),
        ("<Parallel></Parallel> so", [C.MISSING_GUIDELINE]),
        ("<Parallel>", [C.MISSING_GUIDELINE, C.UNCLOSED_TAG]),
        (WRAPPED.replace("b", "<Parallel>"), [C.NESTED_TAG]),
        (WRAPPED.replace("</Parallel>", "") + WRAPPED, [C.UNCLOSED_TAG]),
    ],
)
def test_a_wrapped_dialect_has_the_wrapper_checked_too(text, codes):
    assert [violation.code for violation in parse_text(text, MULTIVERSE).violations] == codes


def test_violations_say_where():
    stray = parse_text(only("</guideline>\n", "</guideline> \nso "), NPR).violations[0]
    assert stray.position == BLOCK.index("</guideline>") + len("</guideline> \n")
    unexpected = parse_text("ab </plan>", NPR).violations[0]
    assert (unexpected.position, "</plan>" in unexpected.message) == (3, True)
    assert parse_text("<guideline>", NPR).violations[0].position == len("<guideline>")


def test_a_tag_free_answer_parses_but_has_no_place_in_a_structural_filter():
    result = parse_text(r"It is \boxed{4}", NPR)
    assert (result.well_formed, result.holds_block) == (True, False)
    assert [violation.code for violation in result.structural_violations] == [C.NO_BLOCK]
    assert parse_text(BLOCK, NPR).structural_violations == ()


def test_the_stream_tells_the_plans_when_their_guideline_closes():
    parser = StreamingParser(NPR)
    seen = []
    for character in BLOCK:
        parser.feed_text(character)
        seen.append((parser.state, parser.guideline_plans()))
    closed = BLOCK.index("</guideline>") + len("</guideline>") - 1
    opened = BLOCK.index("<step>") + len("<step>") - 1
    assert [i for i, (_, plans) in enumerate(seen) if plans] == list(range(closed, opened))
    assert [(plan.label, plan.text) for plan in seen[closed][1]] == [(1, "add"), (2, "multiply")]
    assert seen[closed][0] is State.STEPS
    assert seen[-1][0] is State.PROSE


def test_the_stream_tells_what_is_wrong_with_the_open_block():
    parser = StreamingParser(NPR)
    parser.feed_text("</step>" + BLOCK + "<guideline><plan>7: a</plan><plan>2:</plan></guideline>")
    assert [violation.code for violation in parser.block_violations] == [C.LABEL_OUT_OF_ORDER, C.EMPTY_PLAN]
    assert len(parser.violations) == 3
    assert [plan.label for plan in parser.guideline_plans()] == [7, 2]


def test_misuse_is_the_callers_error():
    parser = StreamingParser(NPR)
    with pytest.raises(ParserUsageError, match="no tokenizer"):
        parser.feed_token(1)
    assert parser.finish() is parser.finish()
    with pytest.raises(ParserUsageError, match="has ended"):
        parser.feed_text("x")


def test_the_final_box_follows_the_last_takeaway():
    boxed = BLOCK.replace("13", r"\boxed{13}")
    assert has_final_box(parse_text(rf"\boxed{{1}} {boxed} \boxed{{13}}", NPR).tree)
    assert not has_final_box(parse_text(boxed, NPR).tree)
    assert not has_final_box(parse_text(rf"{BLOCK} \boxed{{1}} \boxed{{13}}", NPR).tree)
    assert not has_final_box(parse_text(rf"{BLOCK[:-11]} \boxed{{13}}", NPR).tree)


def test_long_soup_takes_linear_time():
    rng = random.Random(0)
    result = parse_text("".join(rng.choice([*NPR.tag_texts, "<", "x", " "]) for _ in range(100_000)), NPR)
    assert result.violations
