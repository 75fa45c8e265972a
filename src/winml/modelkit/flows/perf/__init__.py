"""What does ``winml perf`` do with a whole model, and with a baseline?"""
