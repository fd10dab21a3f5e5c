"""Random well-formed trajectories in canonical order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from npr_common.cues import step_cue, takeaway_cue
from npr_common.dialects import load_dialect
from npr_common.tags import Role, TagIds


@dataclass(frozen=True)
class Tree:
    """A prompt and a response that the engine can decode token by token, ending with EOS."""

    token_ids: tuple[int, ...]
    prompt_length: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's ids."""
        return self.token_ids[: self.prompt_length]


class TreeMaker:
    """Makes trees with the headers and cues that the engine forces."""

    def __init__(self, tokenizer: Any, seed: int = 0, dialect: str = "npr") -> None:
        self._tokenizer = tokenizer
        self._dialect = load_dialect(dialect)
        self._random = random.Random(seed)
        tags = TagIds.from_tokenizer(tokenizer, self._dialect)
        assert tags is not None
        self.tags = tags

    def tree(self, blocks: int | None = None, branches: int | None = None, longest: int = 12) -> Tree:
        """A tree of 1-3 blocks of 1-6 branches of unequal lengths, unless said otherwise."""
        pick = self._random
        prompt = self._prompt()
        response = self.words(pick.randint(0, 4))
        for _ in range(blocks or pick.randint(1, 3)):
            response += self.block(branches or pick.randint(1, 6), longest)
            response += self.words(pick.randint(0, 3))
        return Tree((*prompt, *response, self._tokenizer.eos_token_id), len(prompt))

    def block(self, branches: int, longest: int) -> list[int]:
        """Guideline, steps and takeaway, in a tag of their own where the dialect has one."""
        tags, pick, dialect = self.tags, self._random, self._dialect
        ids = [tags.open(Role.BLOCK)] if dialect.wrapped else []
        ids.append(tags.open(Role.GUIDELINE))
        for number in range(1, branches + 1):
            ids += [tags.open(Role.PLAN), *self.text(dialect.label_of(number) + " "), *self.words(pick.randint(1, 4))]
            ids += [tags.close(Role.PLAN)]
        ids.append(tags.close(Role.GUIDELINE))
        for number in range(1, branches + 1):
            ids += [*step_cue(dialect, number).encode(self._tokenizer), *self.words(pick.randint(1, longest))]
            ids += [tags.close(Role.STEP)]
        ids += [*takeaway_cue(dialect).encode(self._tokenizer), *self.words(pick.randint(1, 5))]
        return [*ids, tags.close(Role.TAKEAWAY), *([tags.close(Role.BLOCK)] if dialect.wrapped else [])]

    def lengthen(self, tree: Tree, words: int, *, last_only: bool = False) -> Tree:
        """The same with so many more words at the end of each step, or of the last one alone."""
        response = tree.token_ids[tree.prompt_length :]
        ends = [place for place, token in enumerate(response) if token == self.tags.close(Role.STEP)]
        longer = ends[-1:] if last_only else ends
        ids = list(tree.prompt)
        for place, token in enumerate(response):
            ids += [*self.words(words), token] if place in longer else [token]
        return Tree(tuple(ids), tree.prompt_length)

    def text(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def words(self, count: int) -> list[int]:
        """Random letters."""
        return self.text("".join(self._random.choice("abcdefghijklmnopqrstuvwxyz") + " " for _ in range(count)))

    def _prompt(self) -> list[int]:
        """A prompt that now and then contains tags, which are the user's text."""
        tail = self.text("<guideline><plan>1: x</plan></guideline>") if self._random.random() < 0.3 else []
        return [*self.words(self._random.randint(1, 20)), *tail]
