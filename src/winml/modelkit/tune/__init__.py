"""Search for the fastest variant of a model on this machine within a quality limit."""
