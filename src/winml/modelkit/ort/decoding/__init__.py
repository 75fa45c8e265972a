"""How does a decoder run, step by step? What it is fed, what one run hands to the next, and the parts around it."""
