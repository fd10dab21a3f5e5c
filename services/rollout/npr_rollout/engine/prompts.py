"""Prompts that several trajectories share, such as the members of a group: decoded once, held by reference.

Invariants:
- An entry's row holds the first tokens of its prompt, all but the last when it is complete; each user feeds the last
  one itself and so gets its own logits. No trajectory forks from an incomplete entry.
- An entry that nobody uses stays, if complete and not empty, until its pages are wanted: `evict` gives up the one that
  was left longest ago. Others go at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npr_rollout.engine.page_table import PageTables

Prompt = tuple[int, ...]


@dataclass(slots=True)
class SharedPrompt:
    """A prompt's row, how many of its tokens are in the pool, and how many trajectories use it."""

    tokens: Prompt
    row: int
    fed: int = 0
    users: int = 0

    @property
    def shared(self) -> int:
        """Tokens that users share: all but the last."""
        return len(self.tokens) - 1

    @property
    def unfed(self) -> int:
        """Shared tokens that are not in the pool yet."""
        return self.shared - self.fed


class SharedPrompts:
    """The prompts in use, and those that may be used again."""

    def __init__(self, tables: PageTables) -> None:
        self._tables = tables
        self._used: dict[Prompt, SharedPrompt] = {}
        self._idle: dict[Prompt, SharedPrompt] = {}  # the one that was left longest ago comes first
        self.evictions = 0
        self._idle_pages = 0

    @property
    def idle_pages(self) -> int:
        """Pages that `evict` can give back."""
        return self._idle_pages

    def rows(self) -> frozenset[int]:
        """Rows of all entries, for the audit."""
        return frozenset(entry.row for entry in self._entries())

    def acquire(self, prompt: Prompt) -> SharedPrompt:
        """The prompt's entry, a new and empty one if need be. Counts one user."""
        entry = self._used.get(prompt)
        if entry is None:
            entry = self._idle.pop(prompt, None)
            if entry is None:
                entry = SharedPrompt(prompt, self._tables.open())
            else:
                self._idle_pages -= len(self._tables.pages_of(entry.row))
            self._used[prompt] = entry
        entry.users += 1
        return entry

    def release(self, entry: SharedPrompt) -> None:
        """Count one user less."""
        entry.users -= 1
        if entry.users:
            return
        del self._used[entry.tokens]
        pages = len(self._tables.pages_of(entry.row))
        if entry.unfed or not pages:
            self._tables.close(entry.row)
        else:
            self._idle[entry.tokens] = entry
            self._idle_pages += pages

    def find(self, prompt: Prompt) -> SharedPrompt | None:
        """The prompt's entry, if it has one."""
        return self._used.get(prompt) or self._idle.get(prompt)

    def evict(self) -> None:
        """Give up the entry that was left longest ago; there must be one."""
        entry = self._idle.pop(next(iter(self._idle)))
        self._idle_pages -= len(self._tables.pages_of(entry.row))
        self._tables.close(entry.row)
        self.evictions += 1

    def _entries(self) -> Iterator[SharedPrompt]:
        yield from self._used.values()
        yield from self._idle.values()
