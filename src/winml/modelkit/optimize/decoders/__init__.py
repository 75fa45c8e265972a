"""How do the operators of a decoder with a cache become few?

By rules of our own. The fusions of transformers' exporter (``fuse_for_onnxruntime``) take several tokens after a cache
for a batch of one only, read every weight to join projections, and match masks and sizes as that exporter writes them:
of the graphs here they fuse no attention (measured with transformers 5.23).
"""
