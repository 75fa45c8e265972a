"""What of ONNX Runtime's own interface needs care: its exceptions, and the libraries that extend it?"""
