"""Parts of the training step that belong to no algorithm."""
