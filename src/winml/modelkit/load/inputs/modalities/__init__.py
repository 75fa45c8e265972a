"""How does each kind of content – text, images, recordings – enter a model? One file a modality."""
