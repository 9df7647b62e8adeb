"""`nvx bench`: times collectives and training steps over nvx and over other backends, in the same processes."""
