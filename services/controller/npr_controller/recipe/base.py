"""What every part of a recipe is: frozen, typed, and closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class RecipePart(BaseModel):
    """A frozen piece of a recipe; an unknown key is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
