"""Stands for Colab's own package, by which a notebook knows where it runs; `google` is a namespace there too."""
