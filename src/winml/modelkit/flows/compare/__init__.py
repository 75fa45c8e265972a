"""What does ``winml compare`` do? Runs two models on the same values, and finds where their answers part."""
