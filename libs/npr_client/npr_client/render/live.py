"""A trajectory while it is decoded: prose runs on, and the branches of a block grow side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from npr.rollout.v1 import rollout_pb2


@dataclass
class _Block:
    branches: dict[int, str] = field(default_factory=dict)


class LiveTrajectory:
    """Collects token chunks; `render` draws what there is."""

    def __init__(self) -> None:
        self._parts: list[str | _Block] = []
        self._blocks: dict[int, _Block] = {}

    def add(self, chunk: rollout_pb2.TokenChunk) -> None:
        """Appends a chunk where it belongs."""
        if chunk.branch_index >= 0:
            block = self._block(chunk.block_index)
            block.branches[chunk.branch_index] = block.branches.get(chunk.branch_index, "") + chunk.text
        elif self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += chunk.text
        else:
            self._parts.append(chunk.text)

    def render(self) -> RenderableType:
        """Prose as text, a block as one column a branch."""
        return Group(*(_draw(part) for part in self._parts))

    def _block(self, index: int) -> _Block:
        if index not in self._blocks:
            self._blocks[index] = _Block()
            self._parts.append(self._blocks[index])
        return self._blocks[index]


def _draw(part: str | _Block) -> RenderableType:
    if isinstance(part, str):
        return Text(part)
    panels = [
        Panel(Text(text.strip()), title=f"step {index + 1}", border_style="blue")
        for index, text in sorted(part.branches.items())
    ]
    return Columns(panels, equal=True, expand=True)
