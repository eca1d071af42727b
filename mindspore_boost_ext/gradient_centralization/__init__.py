"""Gradients minus their mean over the inputs of an output; the rule is in ``base``."""
