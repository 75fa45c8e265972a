"""How well does a model do its task? Samples of data sets, what a model takes of them, and metrics of its answers."""
