"""Do the files of several parts, run one after another, return the outputs of PyTorch?"""
