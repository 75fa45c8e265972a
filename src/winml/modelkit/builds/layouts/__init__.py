"""File layouts of build folders for the tools that open them."""
