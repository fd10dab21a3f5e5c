"""Prompts that several trajectories share, such as the members of a group: decoded once, held by reference.

Invariants:
- An entry's row holds all prompt tokens but the last; each user feeds the last one itself and so gets its own logits.
- The entry lives as long as a trajectory that has rows uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from npr_rollout.engine.page_table import PageTables


@dataclass(slots=True)
class _Entry:
    row: int
    users: int = 0


class SharedPrompts:
    """Rows of the prompts in use, by their token ids."""

    def __init__(self, tables: PageTables) -> None:
        self._tables = tables
        self._entries: dict[tuple[int, ...], _Entry] = {}

    def holds(self, prompt: tuple[int, ...]) -> bool:
        """Whether the prompt is decoded already."""
        return prompt in self._entries

    def rows(self) -> frozenset[int]:
        """Rows of all entries, for the audit."""
        return frozenset(entry.row for entry in self._entries.values())

    def acquire(self, prompt: tuple[int, ...]) -> tuple[int, bool]:
        """The prompt's row, and whether it is new, so that the caller has to feed it. Counts one user."""
        entry = self._entries.get(prompt)
        new = entry is None
        if entry is None:
            entry = self._entries[prompt] = _Entry(self._tables.open())
        entry.users += 1
        return entry.row, new

    def release(self, prompt: tuple[int, ...]) -> None:
        """Count one user less; the last one's leaving closes the row."""
        entry = self._entries[prompt]
        entry.users -= 1
        if entry.users == 0:
            del self._entries[prompt]
            self._tables.close(entry.row)
