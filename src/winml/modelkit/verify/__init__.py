"""Does the file answer as PyTorch does?"""
