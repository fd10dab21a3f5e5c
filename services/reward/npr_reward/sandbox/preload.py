"""Imported once by the fork server, whose children inherit it: SymPy and the LaTeX parser, with their caches warm.

Without it every replacement of a killed process would import for a second and judge its first answers slowly.
"""

from npr_reward.sandbox import child  # noqa: F401
from npr_reward.sandbox.limits import die_with_parent
from npr_reward.verifiers import load_verifiers

die_with_parent()

_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("x^2-1", "(x+1)(x-1)"),
    ("(1, 2]", "1 < x \\le 2"),
    ("\\{1, \\sqrt{2}\\}", "\\{\\sqrt{2}, 1\\}"),
    ("x = 3", "x = 2"),
    ("\\sin x", "\\cos x"),
)

for _gold, _answer in _WARM_UP:
    load_verifiers()["math"].judge(_answer, _gold, {})
