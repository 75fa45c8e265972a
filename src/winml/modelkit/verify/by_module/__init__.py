"""Which module is the first to answer otherwise? Records what modules take and return on two sides, and compares it."""
