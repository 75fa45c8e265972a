"""How are single modules of an ONNX file cut out, run and measured?"""
