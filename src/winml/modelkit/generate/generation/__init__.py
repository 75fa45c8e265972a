"""Text generation with a built model, token by token."""
