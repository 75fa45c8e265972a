"""Inputs of each modality (text, images, audio), one file per modality."""
