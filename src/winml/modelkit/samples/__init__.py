"""Which inputs does a model get in use? Samples of datasets, their preparation, and generated samples."""
