"""From logits to tokens, by the same rules in every engine: penalty, temperature, truncation, draw.

Invariants:
- A draw depends on the request's seed and prompt, the branch and the position, and on nothing else in the batch: one
  uniform number a row, hashed from these, is put through the inverse of the row's own cumulative distribution. So equal
  logits give equal tokens, whichever engine has them.
- The log-probability of a drawn token is that of the distribution it was drawn from: after penalty, temperature, and
  truncation; 0 for greedy decoding, which draws from a point mass.

Shapes: N rows, V words.
"""

from npr_sampling.draw import draw_anywhere
from npr_sampling.penalty import penalise
from npr_sampling.truncation import Cut, truncate
from npr_sampling.uniforms import draw_key, uniforms

__all__ = ["Cut", "draw_anywhere", "draw_key", "penalise", "truncate", "uniforms"]
