"""Operators that are slow on CPU, computed by ones that are fast there."""
