"""Dialects: the schema's tag names as data.

Invariants:
- A dialect is a table, never code: one YAML file per dialect, bundled ones in this folder.
- Every tag is spelled `<name>` or `</name>`, so `<` occurs in a tag at its start only. The lexer relies on it.
- The order of `Dialect.tags` is fixed: roles from the outside in, each opening tag before its closing one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from npr_common.tags import Role, Tag

_REQUIRED_ROLES = frozenset(Role) - {Role.BLOCK}
_INDEX = "{index}"
_MAX_LABEL_DIGITS = 6

TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class DialectError(ValueError):
    """A dialect can't be loaded; the message says what to do."""


class UnknownDialectError(DialectError):
    """No bundled dialect and no file has this name."""


class InvalidDialectError(DialectError):
    """The file is there but is no valid dialect table."""


class Dialect(BaseModel):
    """One table of tag names.

    Attributes:
        name: how recipes refer to it.
        role_names: tag name of each role, without `<` and `>` (key `tags` in YAML). `block` is optional.
        label: form of the label that opens a plan or step, with `{index}` for its number.
        guideline_preamble: whether prose may stand between the guideline's tag and its first plan.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role_names: Mapping[Role, TagName] = Field(alias="tags")
    label: str = "{index}:"
    guideline_preamble: bool = False

    @field_validator("role_names")
    @classmethod
    def _complete_and_distinct(cls, names: Mapping[Role, str]) -> Mapping[Role, str]:
        missing = sorted(role.value for role in _REQUIRED_ROLES - names.keys())
        if missing:
            raise ValueError(f"no tag name for {', '.join(missing)}")
        if len(set(names.values())) != len(names):
            raise ValueError("two roles have the same tag name")
        return names

    @field_validator("label")
    @classmethod
    def _label_has_one_index(cls, label: str) -> str:
        if label.count(_INDEX) != 1:
            raise ValueError(f"a label holds {_INDEX} once")
        return label

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.role_names.items()), self.label, self.guideline_preamble))

    @property
    def wrapped(self) -> bool:
        """Whether each block stands in a tag of its own."""
        return Role.BLOCK in self.role_names

    @functools.cached_property
    def tags(self) -> tuple[Tag, ...]:
        """All tags in their fixed order: 8 for `npr`, 10 for a wrapped dialect."""
        return tuple(Tag(role, closing) for role in Role if role in self.role_names for closing in (False, True))

    @functools.cached_property
    def tag_texts(self) -> Mapping[str, Tag]:
        """Spelling -> tag, in the order of `tags`."""
        return {self.text_of(tag): tag for tag in self.tags}

    @functools.cached_property
    def label_pattern(self) -> re.Pattern[str]:
        """Matches a label at the start of a plan or step; its one group is the number as written."""
        before, after = self.label.split(_INDEX)
        return re.compile(rf"\s*{re.escape(before)}([0-9]{{1,{_MAX_LABEL_DIGITS}}}){re.escape(after)}")

    def text_of(self, tag: Tag) -> str:
        """The tag as it is spelled. Raises KeyError if the dialect has no such role."""
        return f"<{'/' if tag.closing else ''}{self.role_names[tag.role]}>"

    def open(self, role: Role) -> str:
        """The role's opening tag as it is spelled."""
        return self.text_of(Tag(role))

    def close(self, role: Role) -> str:
        """The role's closing tag as it is spelled."""
        return self.text_of(Tag(role, closing=True))

    def label_of(self, index: int) -> str:
        """The label of the plan or step with this number, counted from 1."""
        return self.label.replace(_INDEX, str(index))


def bundled_dialects() -> tuple[str, ...]:
    """Names of the dialects that the package ships, sorted."""
    entries = resources.files(__name__).iterdir()
    return tuple(sorted(Path(entry.name).stem for entry in entries if entry.name.endswith(".yaml")))


def load_dialect(name_or_path: str | Path) -> Dialect:
    """Load a bundled dialect by name or any other from a `.yaml` file.

    Raises:
        UnknownDialectError: neither a bundled name nor a file.
        InvalidDialectError: the file is no valid dialect table.
    """
    text = _read_table(str(name_or_path))
    try:
        return Dialect.model_validate(yaml.safe_load(text))
    except (ValidationError, yaml.YAMLError) as error:
        raise InvalidDialectError(f"Dialect {str(name_or_path)!r} is not valid; correct its table: {error}") from error


def _read_table(name_or_path: str) -> str:
    if name_or_path in bundled_dialects():
        return resources.files(__name__).joinpath(f"{name_or_path}.yaml").read_text("utf-8")
    try:
        return Path(name_or_path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidDialectError(f"Dialect {name_or_path!r} is not UTF-8 text; save it as YAML.") from error
    except OSError as error:
        known = ", ".join(bundled_dialects())
        message = f"No dialect {name_or_path!r}: name one of {known}, or give the path of a YAML table."
        raise UnknownDialectError(message) from error
