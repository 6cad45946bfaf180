"""The loop of ``meshfold train`` and ``meshfold demo``, and what it shows and writes."""
