"""What does ``winml eval`` do: the same samples through a model and a baseline, and what their answers are worth."""
