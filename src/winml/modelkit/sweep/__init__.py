"""How does one export of many model types go? Each runs in its own process, with bounds on time and memory."""
