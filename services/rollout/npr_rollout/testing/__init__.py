"""Small models, tokenizers and random trees, for the package's tests and benchmarks; nothing here serves."""
