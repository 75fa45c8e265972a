"""How does a PyTorch model become a verified ONNX file? What export and the build stage of that name share."""
