"""What surrounds a training on the host: the tuning of the machine."""
