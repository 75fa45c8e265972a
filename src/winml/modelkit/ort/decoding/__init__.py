"""Step-by-step execution of a decoder: its inputs, the state between runs, and the graphs around it."""
