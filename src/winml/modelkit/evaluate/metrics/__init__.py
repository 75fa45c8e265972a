"""How good are predictions? Values by well-kept libraries, and how far chance moves them."""
