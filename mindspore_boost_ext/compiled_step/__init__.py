"""Training steps that run as one graph in PYNATIVE_MODE."""
