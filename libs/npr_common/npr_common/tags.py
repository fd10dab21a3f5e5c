"""Roles, tags, and their token ids in one tokenizer.

Invariants:
- A `Tag` names a place in the schema (its role, opening or closing); only a dialect knows how it is spelled.
- `TagIds` exists only for a tokenizer in which *every* tag of the dialect is one token. Before stage 2 there is none.
- `TagIds` maps one to one: no two tags share a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from npr_common.dialects import Dialect


class Role(Enum):
    """What a pair of tags encloses."""

    BLOCK = "block"
    """The whole block; only in dialects that wrap it."""
    GUIDELINE = "guideline"
    PLAN = "plan"
    STEP = "step"
    TAKEAWAY = "takeaway"


@dataclass(frozen=True, slots=True)
class Tag:
    """The opening or the closing tag of a role."""

    role: Role
    closing: bool = False


@dataclass(frozen=True)
class TagIds:
    """The one-to-one map between the tags of a dialect and their token ids."""

    id_of: Mapping[Tag, int]
    tag_of: Mapping[int, Tag]

    @classmethod
    def from_ids(cls, ids: Mapping[Tag, int]) -> Self:
        """Build the map from known ids.

        Raises:
            ValueError: two tags have the same id.
        """
        inverse = {token_id: tag for tag, token_id in ids.items()}
        if len(inverse) != len(ids):
            raise ValueError(f"Every tag needs a token of its own, got {dict(ids)}.")
        return cls(dict(ids), inverse)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, dialect: Dialect) -> Self | None:
        """The tags' ids in a `transformers` tokenizer; None unless every tag of the dialect is one token."""
        ids: dict[Tag, int] = {}
        for tag in dialect.tags:
            tokens = tokenizer.encode(dialect.text_of(tag), add_special_tokens=False)
            if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
                return None
            ids[tag] = tokens[0]
        return cls.from_ids(ids)

    def get(self, token_id: int) -> Tag | None:
        """The tag that this token is, or None for ordinary text."""
        return self.tag_of.get(token_id)

    def open(self, role: Role) -> int:
        """The token id of the role's opening tag. Raises KeyError if the dialect has no such role."""
        return self.id_of[Tag(role)]

    def close(self, role: Role) -> int:
        """The token id of the role's closing tag. Raises KeyError if the dialect has no such role."""
        return self.id_of[Tag(role, closing=True)]

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.tag_of

    def __iter__(self) -> Iterator[int]:
        return iter(self.tag_of)

    def __len__(self) -> int:
        return len(self.tag_of)
