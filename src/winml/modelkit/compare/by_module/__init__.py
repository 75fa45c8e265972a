"""Which module is the first whose outputs diverge? Compares recorded inputs and outputs of modules."""
