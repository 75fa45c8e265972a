"""What was done? Records only; how they are rendered is told in report/."""
