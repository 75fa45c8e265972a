"""How well does a model perform its task? Tasks, metrics and limits."""
