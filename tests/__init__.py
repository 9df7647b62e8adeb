"""A package, so that pytest puts the folder above on the path and not this one, in which torch/ is not torch."""
