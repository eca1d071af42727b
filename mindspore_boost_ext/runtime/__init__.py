"""What surrounds a training on the host."""
