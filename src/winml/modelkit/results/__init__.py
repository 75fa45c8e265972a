"""What does each verb return? Records only; report/ renders them."""
