"""What npr_learner.seed promises: lossless tokens, a corpus as weak as it says, training that learns, a usable seed."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from npr_common.dialects import load_dialect
from npr_common.schema import parse_text
from npr_common.tags import TagIds
from npr_common.tasks import MultipartTask, Problem, Split, solution_text
from npr_learner.seed import shipped_seed
from npr_learner.seed.corpus import Author, Defect, Mix, Working, parallel_text
from npr_learner.seed.model import new_model
from npr_learner.seed.tokenizer import ASSISTANT, END, USER, build_tokenizer
from npr_learner.seed.train import SeedSettings, batches, collate, examples, rate_factor, train

NPR = load_dialect("npr")
TASK = MultipartTask()
TOKENIZER = build_tokenizer()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small a model is slower on many threads, and reproducible only at one count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def test_tokenizer_is_lossless_on_the_tasks_own_text() -> None:
    author = Author(random.Random(0), Mix())
    for problem in TASK.problems(300, Split.TRAIN):
        for text in (problem.prompt_text, author.response(problem), solution_text(problem, NPR)):
            ids = encode(text)
            assert TOKENIZER.unk_token_id not in ids
            assert TOKENIZER.decode(ids) == text


def test_tags_are_ordinary_text_before_stage_two() -> None:
    assert [TOKENIZER.decode([i]) for i in encode("<plan>1:a</plan>")] == [
        "<",
        "plan",
        ">",
        "1",
        ":",
        "a",
        "</",
        "plan",
        ">",
    ]
    assert TagIds.from_tokenizer(TOKENIZER, NPR) is None


def test_unknown_words_become_one_unknown_token() -> None:
    assert encode("surprise") == [TOKENIZER.unk_token_id]


def test_chat_template_marks_the_turns() -> None:
    turns = [{"role": "user", "content": "max of a=2*3+1"}]
    prompt = TOKENIZER.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == f"{USER}max of a=2*3+1{ASSISTANT}"
    turns.append({"role": "assistant", "content": "\\boxed{7}"})
    assert TOKENIZER.apply_chat_template(turns, tokenize=False) == f"{prompt}\\boxed{{7}}{END}"


def well_formed(text: str) -> bool:
    parsed = parse_text(text, NPR)
    return parsed.well_formed and parsed.holds_block and "\\boxed" in text


def works(count: int) -> list[Working]:
    return [Working(f"2*{i}={2 * i},{2 * i}+1={2 * i + 1}", 2 * i + 1) for i in range(2, 2 + count)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_format_is_well_formed_without_a_defect_and_broken_with_any(count: int) -> None:
    result = Working("max(5,7)=7", 7)
    whole = parallel_text(works(count), result)
    assert well_formed(whole)
    for defect in Defect:
        for at in range(count):
            broken = parallel_text(works(count), result, defect, at)
            assert broken != whole
            assert not well_formed(broken), (defect, broken)


def test_corpus_shares_follow_the_mix() -> None:
    mix = Mix()
    author = Author(random.Random(1), mix)
    texts = [author.response(problem) for problem in TASK.problems(3000, Split.TRAIN)]
    tried = [text for text in texts if "<" in text]
    sound = [text for text in tried if well_formed(text)]
    assert len(sound) / len(texts) == pytest.approx(mix.well_formed, abs=0.02)
    assert len(tried) / len(texts) == pytest.approx(mix.well_formed + mix.defective, abs=0.03)
    hasty, careful = (sum(len(re.findall(form, text)) for text in texts) for form in (r"\d\*\d\+\d=", r"\d\*\d="))
    assert hasty / (hasty + careful) == pytest.approx(mix.haste, abs=0.02)


def test_without_weaknesses_the_corpus_is_always_right() -> None:
    author = Author(random.Random(2), replace(Mix(), forgotten_carry=0.0, slip=0.0))
    for problem in TASK.problems(300, Split.TRAIN):
        answers = Counter(re.findall(r"\d+", author.response(problem).rsplit("\n", 1)[-1]))
        assert answers == Counter([problem.gold])


def test_batches_hold_every_example_once_and_targets_only_responses() -> None:
    settings = SeedSettings(batch_size=4)
    expected = list(islice(examples(TOKENIZER, settings), 64))
    cut = list(islice(batches(examples(TOKENIZER, settings), settings), 16))
    drawn = [example for batch in cut for example in batch]
    assert Counter(map(str, drawn)) == Counter(map(str, expected))
    inputs, targets = collate(cut[0], TOKENIZER.pad_token_id)
    for row, example in enumerate(cut[0]):
        kept = targets[row][targets[row] != -100].tolist()
        assert kept == example.token_ids[example.prompt_length :]
        assert inputs[row, : len(example.token_ids) - 1].tolist() == example.token_ids[:-1]


def test_rate_warms_up_and_ends_near_zero() -> None:
    settings = SeedSettings(steps=100, warmup_steps=10)
    factors = [rate_factor(step, settings) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0)
    assert factors[-1] < 0.01


def test_training_learns_and_is_reproducible() -> None:
    settings = SeedSettings(steps=12, batch_size=8, warmup_steps=2)
    models = [new_model(TOKENIZER, settings.seed) for _ in range(2)]
    runs = [[progress.loss for progress in train(model, TOKENIZER, settings, report_every=4)] for model in models]
    assert runs[0] == runs[1]
    assert runs[0][-1] < 0.8 * runs[0][0]


def test_command_writes_a_loadable_checkpoint_and_spares_a_full_folder(tmp_path: Path) -> None:
    import typer

    from npr_learner.seed.__main__ import main

    app = typer.Typer()
    app.command()(main)
    out = tmp_path / "seed"
    first = CliRunner().invoke(app, [str(out), "--steps", "2"])
    assert first.exit_code == 0, first.output
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == "qwen3"
    written = (out / "model.safetensors").read_bytes()
    second = CliRunner().invoke(app, [str(out), "--steps", "3"])
    assert second.exit_code == 2
    assert "empty" in second.output
    assert (out / "model.safetensors").read_bytes() == written


def test_shipped_seed_is_small_and_made_for_this_tokenizer() -> None:
    folder = shipped_seed()
    assert (folder / "model.safetensors").stat().st_size < 2_000_000
    shipped = AutoTokenizer.from_pretrained(folder)
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    assert shipped.chat_template == TOKENIZER.chat_template


def answers(problems: list[Problem], *, sample: bool) -> list[str]:
    """Responses of the shipped seed, as `transformers` generates them."""
    model = AutoModelForCausalLM.from_pretrained(shipped_seed(), dtype=torch.float32).eval()
    prompts = [f"{USER}{problem.prompt_text}{ASSISTANT}" for problem in problems]
    batch = TOKENIZER(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    torch.manual_seed(5)
    output = model.generate(
        batch.input_ids, attention_mask=batch.attention_mask, do_sample=sample, top_k=0, max_new_tokens=220
    )
    return list(TOKENIZER.batch_decode(output[:, batch.input_ids.shape[1] :], skip_special_tokens=True))


def test_shipped_seed_is_right_and_plain_when_greedy() -> None:
    problems = TASK.problems(100, Split.TEST)
    responses = answers(problems, sample=False)
    right = [text.endswith(f"\\boxed{{{problem.gold}}}") for text, problem in zip(responses, problems, strict=True)]
    assert sum(right) >= 95
    assert not any("<" in text for text in responses)


def test_shipped_seed_is_careless_and_rarely_well_formed_when_sampled() -> None:
    problems = TASK.problems(200, Split.TEST)
    responses = answers(problems, sample=True)
    right = [text.endswith(f"\\boxed{{{problem.gold}}}") for text, problem in zip(responses, problems, strict=True)]
    sound = [well_formed(text) for text in responses]
    assert 0.35 < sum(right) / len(right) < 0.7
    assert 0.0 < sum(sound) / len(sound) < 0.2
