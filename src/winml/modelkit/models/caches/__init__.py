"""KV caches and states of generative models: their layout, and how a graph takes and returns them."""
