"""Mathematics that the sandbox evaluates: parsing, the guard against huge numbers, equality."""
