r"""A word-level tokenizer for multi-part problems.

Invariants
- Lossless on the task's own text: `decode(encode(text)) == text`. Any other word becomes `<|unk|>`.
- A tag is ordinary text, as in any model that has not met the method yet: `<plan>` is `<`, `plan`, `>` and `</plan>`
  is `</`, `plan`, `>`. Stage 2 adds the single tokens.
- Digits stand alone, so numbers of any length are spelled.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from npr_common.tasks import Family

PAD: Final = "<|pad|>"
UNKNOWN: Final = "<|unk|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
END: Final = "<|end|>"
_SPECIAL: Final = (PAD, UNKNOWN, USER, ASSISTANT, END)

# Separators carry the space that follows or surrounds them: a space of its own would cost a token each time.
_SEPARATORS: Final = (", ", " of ", "\n", " ")
_SYMBOLS: Final = ("\\boxed", "</", "<", ">", "{", "}", "(", ")", "+", "*", "=", ",", ":", "/", "-", ".")
_WORDS: Final = (
    *(family.value for family in Family),
    *("guideline", "plan", "step", "takeaway"),
    *"abcdefgh",
)

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{% else %}" + USER + "{% endif %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END + "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; the vocabulary is fixed, so two builds are equal."""
    words = (*_SPECIAL, *"0123456789", *_SEPARATORS, *_SYMBOLS, *_WORDS)
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    pattern = r", | of |\\boxed|</|\d|[a-zA-Z]+|[\s\S]"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
