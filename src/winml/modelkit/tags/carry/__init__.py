"""Transfer of module tags across tools that drop node metadata."""
