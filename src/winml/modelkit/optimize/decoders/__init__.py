"""Fusions of the operators of a decoder with a cache.

The rules are part of this package. The fusions of transformers' exporter (``fuse_for_onnxruntime``) support several
tokens after a cache for a batch of one only, read every weight to merge projections, and match masks and sizes as
written by the exporter: no attention of the graphs here is fused (measured
with transformers 5.23).
"""
