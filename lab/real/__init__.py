"""Quality on pretrained weights."""
