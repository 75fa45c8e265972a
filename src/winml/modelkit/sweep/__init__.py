"""How do many models perform in many configurations? Each pair runs in a separate process with limits."""
