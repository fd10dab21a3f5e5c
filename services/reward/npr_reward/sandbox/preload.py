"""Imported once by the fork server, whose children inherit it: SymPy and the LaTeX parser, with their caches warm.

Without it every replacement of a killed process would import for a second and judge its first answers slowly.
"""

from importlib import import_module
from importlib.util import find_spec

from npr_reward.sandbox import child  # noqa: F401
from npr_reward.sandbox.limits import die_with_parent
from npr_reward.verifiers import load_verifiers

die_with_parent()

if find_spec("reasoning_gym") is not None:  # an optional extra that takes seconds to import
    import_module("reasoning_gym")

# One pair a kind of answer: the parser remembers the decisions that a kind takes.
_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{\\sqrt{3}}{2}", "\\dfrac{3}{2\\sqrt{3}}"),
    ("12\\sqrt{5} + 7", "7 + 12 \\sqrt{5}"),
    ("x^2 - 1", "(x+1)(x-1)"),
    ("3x + 4", "4 + 5x"),
    ("x = 3", "x = 2"),
    ("y = 2x + 1", "2x - y + 1 = 0"),
    ("(1, 2]", "1 < x \\le 2"),
    ("(-\\infty, 1) \\cup [2, \\infty)", "(-\\infty, 2)"),
    ("\\{1, \\sqrt{2}, 3\\}", "\\{\\sqrt{2}, 1, 4\\}"),
    ("1, 2, 3", "3, 2, 1"),
    ("(1, 2, 3)", "\\left(1, \\frac{2}{3}, 3\\right)"),
    ("\\sin x + \\cos^2 x", "\\cos x"),
    ("\\log_2 8", "\\ln 3"),
    ("\\frac{3\\pi}{4}", "135^\\circ"),
    ("2 + 3i", "3i - 2"),
    ("\\pm 4", "4"),
    ("5\\%", "0.05"),
    ("7 \\text{ cm}", "8"),
    ("2^{10} \\cdot 3!", "10^{-3}"),
    ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
)

_math = load_verifiers()["math"]
for _gold, _answer in _WARM_UP:
    _math.judge(_answer, _gold, {})
