"""What is in a dump, without a model: ``python -m dynamicemb.inspect``."""
