"""How do many models fare? Each in a process of its own, with bounds on time and memory."""
