"""Transformation of one ONNX file into another."""
