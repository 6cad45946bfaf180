"""Steps of alignment beside the same steps by hand."""
