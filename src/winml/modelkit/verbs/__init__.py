"""What does a verb do with a request? It makes a plan, which refuses and writes nothing, and runs it."""
