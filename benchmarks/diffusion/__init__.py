"""Denoisers of diffusers, trained beside diffusers' own loop and FSDP2."""
