"""Reading and writing of ONNX files."""
