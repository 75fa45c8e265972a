"""What is in this model?

Reads, and changes nothing: an ONNX file without its weights, or a checkpoint's config and the headers of its weight
files. Prints nothing; ``report`` tells what the records here hold.
"""
