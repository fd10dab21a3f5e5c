"""Tags become single tokens: new rows of the embedding, and of the head where it is its own matrix.

Invariant: a new row is the mean of the rows of the tag's sub-tokens without `<` and `>` (SPEC section 5, stage 2); no
other row changes.
"""

from typing import Any

import torch

from npr_common.dialects import Dialect
from npr_common.errors import InvalidArgumentError
from npr_common.tags import TagIds
from npr_common.tokenizers import TokenizerError, add_tag_tokens, sub_tokens_of_tag


def add_tags(model: Any, tokenizer: Any, dialect: Dialect) -> Any:
    """Adds the dialect's tags to the model, in place, and to a copy of the tokenizer, which is returned.

    A tokenizer that has them all comes back as it is, and so does the model.

    Raises:
        InvalidArgumentError: the tokenizer can't spell a tag's name, or does not take the tags.
    """
    if TagIds.from_tokenizer(tokenizer, dialect) is not None:
        return tokenizer
    try:
        extended = add_tag_tokens(tokenizer, dialect)
        parts = {
            extended.convert_tokens_to_ids(text): sub_tokens_of_tag(tokenizer, text)
            for text in dialect.tag_texts
            if len(tokenizer.encode(text, add_special_tokens=False)) > 1
        }
    except TokenizerError as error:
        raise InvalidArgumentError(str(error), reason="TAGS_NOT_ADDED") from error
    if len(extended) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(extended), mean_resizing=False)
    for matrix in _token_matrices(model):
        _set_rows(matrix, parts)
    return extended


def _token_matrices(model: Any) -> list[torch.Tensor]:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [embedding] if embedding is head else [embedding, head]


@torch.no_grad()
def _set_rows(matrix_VH: torch.Tensor, parts: dict[int, list[int]]) -> None:
    for token_id, sub_tokens in parts.items():
        matrix_VH[token_id] = matrix_VH[sub_tokens].mean(0)
