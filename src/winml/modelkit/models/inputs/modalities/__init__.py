"""How does each modality – text, images, audio – enter a model? One file a modality."""
