"""File layouts of build folders for other tools."""
