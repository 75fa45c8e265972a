"""KV caches and states of generative models: layout, and conversion to graph inputs and outputs."""
