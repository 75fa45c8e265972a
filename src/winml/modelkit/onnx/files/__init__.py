"""How are ONNX files read and written?"""
