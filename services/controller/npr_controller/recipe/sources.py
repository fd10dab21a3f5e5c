"""Where problems come from. Which files and families exist is found out when a source is opened, not here."""

from typing import Annotated, Any, Literal

from pydantic import Field

from npr_common.tasks import Family, Split
from npr_controller.recipe.base import RecipePart


class MultipartSource(RecipePart):
    """The bundled multi-part arithmetic task; its splits share no problem."""

    kind: Literal["multipart"]
    split: Split
    count: int = Field(ge=1, description="problems in the set")
    families: tuple[Family, ...] = tuple(Family)
    parts: tuple[int, int] = Field(default=(2, 4), description="least and most parts of a problem")
    verifier: str = "math"


class FileSource(RecipePart):
    """A JSONL, JSON or Parquet file in a public benchmark's own form.

    `url` is a path, an fsspec URL, or `package:MODULE/PATH` for a file that an installed package ships. Question and
    answer are found by the field names of the public files unless they are named here.
    """

    kind: Literal["file"]
    url: str
    question_field: str | None = None
    answer_field: str | None = None
    verifier: str | None = Field(default=None, description="unset: chosen by the file's form")
    limit: int | None = Field(default=None, ge=1, description="only the first so many problems")


class ReasoningGymSource(RecipePart):
    """A procedural family of reasoning-gym. Sets with different seeds draw independently."""

    kind: Literal["reasoning_gym"]
    family: str
    count: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    options: dict[str, Any] = Field(default_factory=dict, description="the family's own configuration")
    verifier: str = "math"


Source = Annotated[MultipartSource | FileSource | ReasoningGymSource, Field(discriminator="kind")]


class Data(RecipePart):
    """Problems to learn from and, by benchmark name, problems to be measured on."""

    train: Source | None = None
    test: dict[str, Source] = Field(min_length=1)
