"""Module comparison: recorded inputs and outputs of modules, and the first module that diverges."""
