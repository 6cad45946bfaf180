"""Blocks of the Evoformer beside OpenFold's eager code and torch.compile."""
