"""How do many models fare in many configurations? Each pair has its own process, with bounds on time and memory."""
