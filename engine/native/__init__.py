"""The CPU forward in C: ``llama.c``, compiled for this machine at its first use (``build``), called by ``runner``."""
