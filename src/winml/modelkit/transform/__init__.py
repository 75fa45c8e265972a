"""How does one ONNX file become another?"""
