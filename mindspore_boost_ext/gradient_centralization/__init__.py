"""Gradients without what all inputs of an output have in common; the rule stands in ``base``."""
