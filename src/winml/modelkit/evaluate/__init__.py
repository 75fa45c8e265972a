"""How well does a model perform its task? Samples of datasets, their preparation, and metrics of the outputs."""
