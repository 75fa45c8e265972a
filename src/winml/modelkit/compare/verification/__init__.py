"""Are the outputs of the file those of PyTorch?"""
