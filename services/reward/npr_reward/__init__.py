"""The `reward` service: judges answers, grades format, and makes rewards of both (SPEC section 4).

Invariants:
- A verdict is a pure function of (verifier, answer, gold, metadata): judging twice gives the same verdict.
- Text of a model is only ever scanned in linear time in this process. Whatever evaluates it runs in the sandbox:
  a process of its own, under a memory limit and a deadline that the service enforces by killing it.
- A hostile answer costs its own deadline, never the batch, and no text of a model is ever given to `eval`.
"""
