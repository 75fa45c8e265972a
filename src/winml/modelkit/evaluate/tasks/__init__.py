"""What is right in a task? What it reads of a data set, how outputs become predictions, and which metrics it has."""
