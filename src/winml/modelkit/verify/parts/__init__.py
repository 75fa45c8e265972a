"""Do the files of several parts, run one after another, answer as PyTorch does?"""
