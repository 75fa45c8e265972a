"""Parts of models of the transformers library, and the inputs of each part."""
