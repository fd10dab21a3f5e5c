"""Attention over packed trees: which tokens see which (`forest`), and the ways to compute it."""
