"""Fixtures shared by the packages' tests; nothing here runs in production."""
